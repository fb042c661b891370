"""Chips, nodes, pools, fabrics and clusters: what a person owns, as files and frozen facts."""
