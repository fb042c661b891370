"""`tutti bench`: one file per benchmark."""
