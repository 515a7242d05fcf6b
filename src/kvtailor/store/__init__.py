"""Where tokens live that are not in fast memory. Knows no model."""
