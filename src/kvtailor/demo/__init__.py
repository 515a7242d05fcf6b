"""The demonstration: one question about a long text, answered with the default cache and with plans."""
