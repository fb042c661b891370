"""The server: an OpenAI client on one side, engines on the other.

`supervisor` starts the processes and restarts what dies: `api_process` speaks HTTP, tokenises and
detokenises; `engine_process` holds the chip and knows token ids only. They exchange `messages`
(msgspec over zmq, nothing pickled) by sockets in a folder that only this user can enter.
"""
