"""The training engine: runs a Plan's own instruction lists, one rank per chip."""
