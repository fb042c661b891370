"""Tasks that a model is held against: multiple choice and perplexity, during a run and after it."""
