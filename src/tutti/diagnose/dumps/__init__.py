"""Who stopped whom, from what flight recorders wrote."""
