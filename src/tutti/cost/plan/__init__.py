"""The price of a Plan: seconds and bytes of every instruction of its Schedule."""
