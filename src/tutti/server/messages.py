"""What API processes and engines say to each other, and the files that say how a server is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tutti.batching.router import Routing
from tutti.errors import InputError
from tutti.serve.handover.handed import Handover


class Wishes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request's tokens are chosen: one sample, token ids only."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    salt: str = ""
    adapter: str = ""
    grammar: str = ""  # as llguidance reads it; "": none
    hooks: dict[str, dict[str, Any]] = {}  # whose changes of logits are wanted, with settings
    answered: int = 0  # the prompt's last tokens that are the answer's first: it goes on elsewhere


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request; `pooling`: its hidden states are wanted, no tokens.

    `handover`: the keys and values of its prompt go to another engine. `imported`: they come from
    another one, under this name.
    """

    id: int
    tokens: list[int]
    wishes: Wishes
    pooling: str | None = None
    handover: Handover | None = None
    imported: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody wants a request any more."""

    id: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A client is dead: all its requests are cancelled."""

    client: bytes


class LoadAdapter(msgspec.Struct, frozen=True, tag="load"):
    """Requests may name a LoRA adapter from now on."""

    id: int
    name: str
    folder: str


class DropAdapter(msgspec.Struct, frozen=True, tag="drop"):
    """They may not any more."""

    id: int
    name: str


class Likely(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability, and those of the likeliest in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Update(msgspec.Struct, frozen=True, tag="update", omit_defaults=True):
    """What a step added to a request; with `finish` it is over."""

    id: int
    tokens: list[int] = []
    finish: str | None = None
    reason: str = ""
    logprobs: list[Likely] = []
    prompt_logprobs: list[Likely] = []
    cached: int = 0
    embedding: list[float] | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused", omit_defaults=True):
    """A request that cannot be: the user's mistake; `failed`: the engine's own."""

    id: int
    message: str
    failed: bool = False


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An adapter came or went."""

    id: int


class Load(msgspec.Struct, frozen=True, tag="load_of"):
    """How busy an engine is."""

    running: int
    waiting: int
    pages_used: int
    pages: int
    steps: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int
    stowed_pages: int
    fetched_pages: int
    guessed_tokens: int
    foreseen_tokens: int


ToEngine = Submit | Cancel | Gone | LoadAdapter | DropAdapter
FromEngine = Update | Refused | Done | Load

encode = msgspec.msgpack.Encoder().encode
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def for_engine(data: bytes) -> ToEngine:
    """Return what an API process said."""
    said: ToEngine = _to_engine.decode(data)
    return said


def from_engine(data: bytes) -> list[FromEngine]:
    """Return what an engine said."""
    return _from_engine.decode(data)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the processes of a server are told; `engine` are `open_worker`'s options."""

    folder: str
    name: str
    engine: dict[str, Any]
    host: str = "127.0.0.1"
    port: int = 8000
    apis: int = 1
    keys: tuple[str, ...] = ()
    queue: int = 1024  # requests at a time; more are turned away
    most_body: int = 16 << 20  # bytes
    log_prompts: bool = False
    traces: str = ""  # the folder of requests' traces; "": none
    warm_up: bool = True
    plan: str = ""  # its file; "": one engine, on one chip
    routing: Routing = "queues"
    spread: bool = False  # engines are on hosts that join


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine."""

    number: int = 0
    generation: int = 0  # one more each time it is started
    address: str = ""
    ready: bool = False
    context: int = 0
    vocab: int = 0
    slots: int = 0
    page_size: int = 16


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor says of its engines, in a file that API processes read."""

    engines: tuple[EngineState, ...] = ()
    draining: bool = False

    @property
    def ready(self) -> bool:
        """Whether there is an engine that takes requests."""
        return any(engine.ready for engine in self.engines)

    @property
    def context(self) -> int:
        """The most tokens of a request; 0: no engine has said it yet."""
        return min((engine.context for engine in self.engines if engine.context), default=0)

    @property
    def vocab(self) -> int:
        """Tokens that the model knows."""
        return max((engine.vocab for engine in self.engines), default=0)

    @property
    def slots(self) -> int:
        """Sequences at a time, of engines that take requests."""
        return sum(engine.slots for engine in self.engines if engine.ready)

    def with_engine(self, engine: EngineState) -> State:
        """Return the state with another word on one engine."""
        others = [own for own in self.engines if own.number != engine.number]
        ordered = sorted([*others, engine], key=lambda own: own.number)
        return State(engines=tuple(ordered), draining=self.draining)


class HostAddress(msgspec.Struct, frozen=True):
    """Where a host's ranks listen: an address, and the first of their ports."""

    address: str
    ports: int


class ServerFolder:
    """The folder of a running server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, value: Any) -> None:
        """Write a file such that nobody sees half of it."""
        new = self.path / f".{name}.{os.getpid()}"
        new.write_bytes(msgspec.json.encode(value))
        new.replace(self.path / name)

    def config(self) -> ServerConfig:
        """Return what the server was started with."""
        return msgspec.json.decode((self.path / "config.json").read_bytes(), type=ServerConfig)

    def state(self) -> State:
        """Return how its engine is."""
        try:
            data = (self.path / "state.json").read_bytes()
        except FileNotFoundError:
            return State()
        return msgspec.json.decode(data, type=State)

    def adapters(self) -> dict[str, str] | None:
        """Return the folders of its adapters by name; None before an engine said them."""
        try:
            data = (self.path / "adapters.json").read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=dict[str, str])

    def hosts(self) -> dict[str, HostAddress]:
        """Return where the hosts of a deployment are; none where there is one machine."""
        try:
            data = (self.path / "hosts.json").read_bytes()
        except FileNotFoundError:
            return {}
        return msgspec.json.decode(data, type=dict[str, HostAddress])

    def socket(self, name: str) -> str:
        """Return a socket in the folder, as zmq calls it."""
        path = str(self.path / f"{name}.sock")
        if len(path) > 100:  # of 107 that a socket's name may have
            raise InputError(f"the folder's name is too long for a socket: {self.path}")
        return f"ipc://{path}"

    def heartbeat(self, engine: int, generation: int, rank: int = 0) -> Path:
        """Return the file that a process of an engine touches every second while it lives."""
        return self.path / f"alive{engine}-{generation}-{rank}"

    def ready(self, engine: int, generation: int) -> Path:
        """Return the file that an engine writes when it can take requests."""
        return self.path / f"ready{engine}-{generation}.json"

    def overrun(self, engine: int) -> Path:
        """Return the file in which an engine on an emulated chip says whether the host keeps up.

        It has the seconds that the chip worked, and by how many the host was late.
        """
        return self.path / f"overrun{engine}.json"

    def failed(self, engine: int, generation: int) -> Path:
        """Return the file in which an engine says why it cannot be."""
        return self.path / f"failed{engine}-{generation}.json"
