"""SmolLM2-135M, real weights from a GGUF file: transformers loads them and speaks English."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from tutti.errors import InputError  # noqa: E402
from tutti.huggingface.conversion import convert  # noqa: E402
from tutti.huggingface.folders import open_checkpoint  # noqa: E402
from tutti.huggingface.gguf_file import convert_gguf  # noqa: E402


@pytest.mark.slow  # test_it_goes_on_to_our_folder reads the same file
def test_it_speaks_english(smollm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        smollm, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.num_parameters() == 134_515_008

    def said(prompt: str, tokens: int) -> str:
        given = tokenizer(prompt, return_tensors="pt")
        return tokenizer.decode(model.generate(**given, max_new_tokens=tokens, do_sample=False)[0])

    assert said("The capital of France is", 2) == "The capital of France is Paris."
    story = said("Once upon a time", 12)
    assert story.startswith("Once upon a time, the city of Nova Haven was a thriving metropolis")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert said(chat, 9).endswith("assistant\nThe capital of France is Paris.<|im_end|>")


def test_text_survives_the_tokenizer(smollm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm)
    text = "Hello, world! 1234  x=3\n\tfoo's “quoted” ünïcode 中文 <|im_start|>user"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in ids
    assert len(tokenizer("1234").input_ids) == 4, "digits stand alone in SmolLM"


def test_it_goes_on_to_our_folder(smollm: Path, tmp_path: Path) -> None:
    convert(smollm, tmp_path / "ours")
    ours, theirs = open_checkpoint(tmp_path / "ours"), open_checkpoint(smollm)
    for name in ("0.token.weight", "1.attention.query.weight", "31.norm.weight"):
        assert torch.equal(ours.read(name), theirs.read(name))


# --- small files made here -------------------------------------------------------------------

HEADS, KV_HEADS, WIDTH, HIDDEN, INNER, VOCAB = 4, 2, 8, 32, 48, 16


def write_gguf(path: Path, *, architecture: str = "llama", drop: str = "", extra: str = "") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges(["t 0"])
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "output": (VOCAB, HIDDEN),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * WIDTH, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * WIDTH, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * WIDTH, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * WIDTH),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        if name != drop:
            numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            writer.add_tensor(f"{name}.weight", numbers)
    if extra:
        writer.add_tensor(extra, np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_rows_of_queries_and_keys_are_put_back(tmp_path: Path) -> None:
    """llama.cpp pairs row i of a head's first half with row i of its second half."""
    write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["rms_norm_eps"] == 1e-5
    query = open_checkpoint(tmp_path / "hf").read("1.attention.query.weight")
    rows = (query[:, 0] / HIDDEN).int().tolist()
    assert rows[:WIDTH] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert rows[WIDTH : 2 * WIDTH] == [8, 10, 12, 14, 9, 11, 13, 15]
    value = open_checkpoint(tmp_path / "hf").read("1.attention.value.weight")
    assert (value[:, 0] / HIDDEN).int().tolist() == list(range(KV_HEADS * WIDTH))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "mamba"}, "its architecture is 'mamba'; of GGUF files tutti reads"),
        ({"drop": "blk.0.attn_k"}, r"tensor 'blk.0.attn_k.weight' is missing; expected \[16, 32\]"),
        ({"extra": "blk.0.new"}, "tensor 'blk.0.new' is no tensor of this model"),
        ({"extra": "rope_freqs.weight"}, "has scaled rotary frequencies"),
    ],
)
def test_files_that_cannot_be_read(options: dict[str, str], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(InputError, match=said):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for size in (3, 200, len(data) // 2):
        (tmp_path / "m.gguf").write_bytes(data[:size])
        with pytest.raises(InputError, match="no GGUF file, or cut short"):
            convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
