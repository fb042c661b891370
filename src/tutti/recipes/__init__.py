"""Training files that work as they are, with a small model and data to try them on.

The losses that preference files name are in `accelerator.reference.preference_losses` (DPO, KTO,
reward models) and `accelerator.reference.sampled_answers` (GRPO, RLOO).
"""
