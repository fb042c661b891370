"""The Plan: the one artifact that carries a parallel strategy; its JSON and its checker."""
