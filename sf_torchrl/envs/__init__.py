"""What an environment must be, and what is read from it before anything starts."""
