"""Plans as configurations of other training systems: Megatron-LM and FlagScale."""
