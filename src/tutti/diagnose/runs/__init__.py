"""What is wrong with a run of ours, from its folder: live, or when it is over."""
