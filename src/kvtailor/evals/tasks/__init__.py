"""Tasks: what is asked of a model, a file for each family."""
