"""What verbs share: output, progress, terminals."""
