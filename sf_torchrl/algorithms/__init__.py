"""Pure functions of APPO: returns, advantages, lag, action distributions, normalization."""
