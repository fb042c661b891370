"""Prices of serving: seconds of a scheduler's step on a stage, keys and values over links, pages.

The same formulas and profiles as training's price products, collectives and links; what serving
has of its own stands here: attention to pages, sampling, steps that run as one graph.
"""
