"""The collator of hosts: transformers' conventions, masks with windows, padded batches, and inputs it refuses."""

import inspect

import numpy as np
import pytest
import torch

from multipack.integrations.collator import (
    PackedDataCollator,
    document_lengths,
    makes_document_masks,
    windows_of,
)
from multipack.shapes import RotationLimit

DOCUMENTS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [5, -100, 7, 8, 9], "text": "ignored"},
    {"input_ids": [10, 11], "completion_mask": [0, 1]},
    {"input_ids": np.array([12, 13, 14, 0]), "attention_mask": torch.tensor([1, 1, 1, 0])},
]


def test_a_flattened_row_is_what_transformers_makes():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [5, -100, 7, 8, 9]},
        {"input_ids": [10, 11], "labels": [-100, 11]},
        {"input_ids": [12, 13, 14], "labels": [12, 13, 14]},
    ]
    if "return_seq_idx" not in inspect.signature(transformers.DataCollatorWithFlattening).parameters:
        pytest.skip("this transformers has no boundaries in its rows")
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    ours = PackedDataCollator()(DOCUMENTS)
    assert ours.pop("use_cache") is False
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert type(value) is type(theirs[name])
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype
            assert value.equal(theirs[name]), name
        else:
            assert value == theirs[name]


def test_padded_rows_and_padding_before_documents():
    padded = PackedDataCollator("padded", pad_id=3)(DOCUMENTS)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 8, 9], [10, 11, 3, 3, 3], [12, 13, 14, 3, 3]]
    assert padded["attention_mask"].sum(dim=1).tolist() == [5, 2, 3]
    columns = {name: padded[name].flip(1) for name in ("input_ids", "labels", "attention_mask")}
    left = [{name: values[row] for name, values in columns.items()} for row in range(3)]
    assert PackedDataCollator()(left)["input_ids"].tolist() == [[9, 8, 7, 6, 5, 11, 10, 14, 13, 12]]


def test_documents_that_change_the_rotation_of_their_row_are_refused():
    collate = PackedDataCollator(limit=RotationLimit(4, "longrope", "original_max_position_embeddings"))
    assert collate(DOCUMENTS[1:])["cu_seq_lens_q"].tolist() == [0, 2, 5]
    with pytest.raises(ValueError, match=r"document 0 has 5 tokens.*rope_type=longrope.*_embeddings=4"):
        collate(DOCUMENTS)


def test_no_documents_are_one_token_without_a_label():
    empty = PackedDataCollator(pad_id=7)([])
    assert empty["input_ids"].tolist() == [[7]]
    assert empty["labels"].tolist() == [[-100]]


def test_masks():
    row = PackedDataCollator("4d_mask", window=2)(DOCUMENTS)
    assert "cu_seq_lens_q" not in row
    seen = row["attention_mask"] == 0
    assert row["attention_mask"].min() == torch.finfo(torch.float32).min
    assert seen.shape == (1, 1, 10, 10)
    assert [seen[0, 0, token].nonzero().flatten().tolist() for token in (0, 3, 5, 6, 9)] == [
        [0],
        [2, 3],
        [5],
        [5, 6],
        [8, 9],
    ]
    added = PackedDataCollator("4d_mask", window={"a": None, "b": 2})(DOCUMENTS)["attention_mask"]
    assert (added["b"] == 0).equal(seen)
    assert (added["a"] == 0).sum() == 15 + 3 + 6


KINDS = pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "qwen2"])


def config_of(kind):
    """A tiny configuration; the windows of the model are shorter than the documents."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if not makes_document_masks() and kind != "llama":
        pytest.skip("windows of layers are known since transformers 4.53")
    windows = {"mistral": {"sliding_window": 3}, "gemma3_text": {"sliding_window": 3, "head_dim": 8}}
    windows["qwen2"] = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    return transformers.AutoConfig.for_model(
        kind, vocab_size=32, num_key_value_heads=2, **sizes, **windows.get(kind, {}), pad_token_id=0
    )


TEXTS = [
    {"input_ids": list(range(first, first + count))} for first, count in ((1, 9), (11, 5), (17, 8), (1, 1))
]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_those_of_transformers(kind, dtype):
    """In shape, dtype and every value, for eager attention."""
    config = config_of(kind)
    masking = pytest.importorskip("transformers.masking_utils", reason="since transformers 4.53")
    config._attn_implementation = "eager"
    flat = PackedDataCollator()(TEXTS)
    collate = PackedDataCollator("4d_mask", dtype=dtype, window=windows_of(config))
    ours, slots = collate(TEXTS)["attention_mask"], flat["input_ids"].numel()
    given = {"config": config, "attention_mask": None, "past_key_values": None}
    given |= dict.fromkeys(("inputs_embeds", "input_embeds"), torch.zeros(1, slots, 16, dtype=dtype))
    given |= {"cache_position": torch.arange(slots), "position_ids": flat["position_ids"]}
    makers = {"full_attention": masking.create_causal_mask}
    makers["sliding_attention"] = masking.create_sliding_window_causal_mask
    if not isinstance(ours, dict):
        ours = {"full_attention" if windows_of(config) is None else "sliding_attention": ours}
    for layers, mask in ours.items():
        taken = inspect.signature(makers[layers]).parameters
        theirs = makers[layers](**{name: value for name, value in given.items() if name in taken})
        assert mask.dtype == theirs.dtype
        assert mask.equal(theirs)


@KINDS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_compute_documents_alone_with_masks_and_with_positions(kind, attention):
    config = config_of(kind)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    window = windows_of(config)
    collators = [PackedDataCollator("4d_mask", window=window)]
    if makes_document_masks():
        collators.append(PackedDataCollator())
    padded = PackedDataCollator("padded")(TEXTS)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([d["input_ids"]]), use_cache=False).logits[0] for d in TEXTS])
        for collator in collators:
            assert torch.allclose(model(**collator(TEXTS)).logits[0], alone, atol=1e-5)
        assert torch.allclose(model(**padded).logits[padded["attention_mask"] == 1], alone, atol=1e-5)


def test_lengths():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"input_ids": list(range(count)), "text": "x" * count} for count in (3, 1, 7, 2)]
    arrow = datasets.Dataset.from_list(rows)
    assert document_lengths(rows).tolist() == [3, 1, 7, 2]
    assert document_lengths(arrow).tolist() == [3, 1, 7, 2]
    assert document_lengths(arrow.select([2, 0]).with_format("torch")).tolist() == [7, 3]
    doubled = arrow.with_transform(lambda page: {"input_ids": [2 * ids for ids in page["input_ids"]]})
    assert document_lengths(doubled).tolist() == [6, 2, 14, 4]
    for wrong, message in (
        (arrow.select_columns(["text"]), r"no column input_ids \(it has text\): tokenize"),
        (arrow.to_iterable_dataset(), "load it without streaming"),
        (arrow.select([]), "no documents"),
    ):
        with pytest.raises(ValueError, match=message):
            document_lengths(wrong)
