"""OpenAI's HTTP interface: requests as they come, answers as its clients expect them."""
