"""Who holds which part of which parameter, gradient and optimizer state: one answer for all."""
