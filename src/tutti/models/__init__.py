"""What a Hugging Face config.json says, reduced to units, with their parameters, FLOPs and bytes."""
