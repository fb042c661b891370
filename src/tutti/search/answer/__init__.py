"""What a search returns: the plan, its baseline, words and figures, and why nothing fits."""
