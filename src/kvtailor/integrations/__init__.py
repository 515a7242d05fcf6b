"""kvtailor inside of other systems."""
