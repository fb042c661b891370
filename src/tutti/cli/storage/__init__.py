"""Verbs about storage: what `tutti profile --storage` measures and shows."""
