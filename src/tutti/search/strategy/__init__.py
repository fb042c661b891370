"""A strategy while it is searched: coarse chains, candidates, drafts, and their limits."""
