"""Searches that visit everything: small spaces, and the formula that planners are compared by."""
