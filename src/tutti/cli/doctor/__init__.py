"""`tutti doctor`: what is wrong, where, and what to do."""
