"""The command line: ``kvtailor``, one file per command."""
