"""Networks: encoders, heads, and the actor-critic made of them."""
