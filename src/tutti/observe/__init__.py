"""What a run tells of itself: figures of steps, and where they go."""
