"""Units over stages, the batch over pipelines, memory relief, and small changes after that."""
