"""Collective programs as data, and an interpreter that proves what they compute."""
