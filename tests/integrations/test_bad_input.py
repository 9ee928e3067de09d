"""Bad input of every part for hosts: one line that says what is wrong, and where."""

import numpy as np
import pytest
import torch
from torch import nn

from multipack import isolation_probe
from multipack.integrations import axolotl as functions
from multipack.integrations import openrlhf, verl
from multipack.integrations.axolotl_sampler import MultipackBatchSampler
from multipack.integrations.collator import PackedDataCollator, document_lengths, windows_of
from multipack.integrations.multipack_v2 import InterleavedSampler, MultipackDistributedBatchSampler

NAN = float("nan")
FLOATS = [{"input_ids": [1.5, 2.0]}]


class Counted(list):
    """A data set that says its lengths, or another len."""

    def __init__(self, rows, lengths=None, length=None):
        super().__init__(rows)
        self.length = len(rows) if length is None else length
        if lengths is not None:
            self.lengths = lengths

    def __len__(self):
        return self.length


def collate(*features, **settings):
    return PackedDataCollator(**settings)(*features)


def row(**columns):
    return collate([{"input_ids": [1, 2], **columns}])


def axolotl(sampler=range(2), lengths=(5, 5), **settings):
    sizes = {"batch_size": 1, "batch_max_len": 10}
    return list(MultipackBatchSampler(sampler, lengths=lengths, **sizes | settings))


def v2(**settings):
    given = {"batch_max_length": 10, "lengths": [5, 6, 7], "num_replicas": 1, "rank": 0}
    return MultipackDistributedBatchSampler(**given | settings)


def probe(model=None, **settings):
    return isolation_probe(nn.Embedding(64, 4) if model is None else model, **settings)


def rearranged(**settings):
    given = {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}
    return verl.rearrange_micro_batches(settings.pop("batch", given), 8, **settings)


ROW = {"input_ids": [1]}
COLLATOR = [
    (lambda: collate([], pad_id=-1), "pad_id must be a whole number of at least 0, got -1"),
    (lambda: collate([], dtype="float32"), "dtype='float32' must be a floating dtype of torch"),
    (lambda: collate([], returns="4d_mask", window=0), "window must be a whole number of at least 1, got 0"),
    (lambda: collate([], returns="4d_mask", window=1.5), "window must be a whole number"),
    (lambda: collate([], returns="4d_mask", window="a"), "window must be a whole number"),
    (lambda: collate([], returns="4d_mask", window={"full": NAN}), "window must be a whole number"),
    (lambda: collate([], window=3), "window=3 is of returns='4d_mask': with 'flattened'"),
    (lambda: collate(None), "a batch must be a list of documents, got None"),
    (lambda: collate([None]), "document 0 of the batch is None: it must be a mapping"),
    (
        lambda: collate([{"labels": [1]}]),
        "document 0 of the batch has no input_ids (it has labels): tokenize",
    ),
    (lambda: row(input_ids=None), "document 0 of the batch has no input_ids"),
    (lambda: row(input_ids=[1.5, 2]), "document 0 of the batch has input_ids of float64"),
    (lambda: row(input_ids=[2**70]), "document 0 of the batch has input_ids of object"),
    (lambda: row(input_ids=[1, [2]]), "document 0 of the batch must be flat lists of integers"),
    (lambda: row(labels=[1]), "labels of int64 and shape (1,), and input_ids of (2,)"),
    (lambda: row(attention_mask=[0, 0]), "document 0 of the batch has no tokens"),
    (lambda: row(attention_mask=[1, 2]), "give one document per row"),
    (lambda: row(input_ids=[[1, 2]]), "must be flat lists of integers"),
    (lambda: row(input_ids=[]), "no tokens: remove such documents"),
    (lambda: row(seq_lengths=[1, 1]), "the data set is packed already"),
    (lambda: collate([], returns="flat"), "nearest: flattened"),
    (lambda: document_lengths([1, 2]), "document 0 of 2 must be a mapping with a list input_ids"),
    (lambda: document_lengths([ROW, {"text": 1}]), "no column input_ids (it has text)"),
    (lambda: document_lengths([{"input_ids": None}]), "document 0 of 1 must be a mapping with a list"),
    (lambda: document_lengths({"input_ids": [[1]]}), "document 0 of 1 must be a mapping"),
    (lambda: document_lengths(Counted([ROW], length=5)), "document 1 of 5 must be a mapping"),
    (lambda: document_lengths(Counted([ROW], [1, 2])), "1 documents, and its attribute lengths has 2"),
    (lambda: document_lengths(Counted([ROW], [NAN])), "attribute lengths must be a flat list of integers"),
    (lambda: windows_of(None), "windows_of takes a model's config, got None"),
]
SAMPLERS = [
    (lambda: axolotl(None), "sampler=None must be a sampler"),
    (lambda: axolotl([0.5, 1]), "the sampler yields something else than document numbers"),
    (lambda: axolotl(range(9)), "yields document 8, but lengths has 2 documents"),
    (lambda: axolotl(lengths=[NAN, 2]), "lengths must be a flat list of integers"),
    (lambda: axolotl([]), "yields no document numbers"),
    (lambda: axolotl(batch_size=0), "batch_size"),
    (lambda: axolotl(batch_max_len=0), "batch_max_len must be"),
    (lambda: axolotl(group_size=0), "group_size must be"),
    (lambda: axolotl(bin_size=-1), "bin_size must be"),
    (lambda: axolotl(overlong="cut"), "overlong='cut' is unknown"),
    (lambda: axolotl(num_replicas=2, rank=0), "num_replicas, rank"),
    (lambda: v2(lengths=[5, 11]), "document 1 has 11 tokens"),
    (lambda: v2(lengths=[3, 0]), "document 1 has 0 tokens"),
    (lambda: v2(seed=-1), "seed must be a whole number"),
    (lambda: v2(batch_max_length=0), "batch_max_length must be"),
    (lambda: v2(window=0), "window must be"),
    (lambda: v2(overlong="cut"), "overlong='cut' is unknown"),
    (lambda: v2(num_replicas=2, rank=2), "rank=2 is outside num_replicas=2"),
    (lambda: v2(num_replicas=2, rank=None), "give both num_replicas and rank"),
    (lambda: InterleavedSampler([NAN], 1, 1, 0), "lengths must be a flat list of integers"),
    (lambda: InterleavedSampler([3, 4, 5], 2, 2, 0), "3 documents are too few for a batch of batch_size=2"),
    (lambda: functions.ffd_check(["a"], 10, 2), "sequence_lengths must be a flat list of integers"),
    (lambda: functions.ffd_check([3], 0, 2), "bin_capacity must be a whole number of at least 1"),
    (lambda: functions.pack_group([3], -1, 10, 2, 2), "group_offset must be a whole number"),
    (lambda: functions.pack_group([3], 0, 10, NAN, 2), "max_bins must be a whole number"),
    (lambda: functions.pack_parallel(None, 10, 2, 2), "sequence_lengths must be a flat list"),
    (lambda: functions.allocate_sequentially([3], 2, 10, 2), "rank must be at most 1, got 2"),
]
OTHERS = [
    (lambda: rearranged(batch=None), "the batch is NoneType without"),
    (lambda: rearranged(batch={"input_ids": torch.ones(2, 3)}), "without 'attention_mask'"),
    (lambda: rearranged(num_batches_divided_by="a"), "num_batches_divided_by must be a whole number"),
    (lambda: openrlhf.get_minimum_num_micro_batch_size([9], 8, 1, 1), "raise max_tokens_per_gpu to 9"),
    (lambda: probe(3), "model must be a model or a function, got 3"),
    (lambda: probe(forward=3), "forward must be a model or a function, got 3"),
    (lambda: probe(lengths=(3, -1)), "document 1 has -1 tokens"),
    (lambda: probe(lengths=(3,)), "lengths=(3,): the probe needs at least two documents"),
    (lambda: probe(vocabulary_size=1.5), "vocabulary_size must be a whole number"),
    (lambda: probe(vocabulary_size=1), "a vocabulary of 1 tokens, 0 of them special, leaves none to change"),
]


@pytest.mark.parametrize(("call", "message"), [*COLLATOR, *SAMPLERS, *OTHERS])
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:1 of 1 documents")
def test_documents_that_are_all_too_long():
    with pytest.raises(ValueError, match="none is left to pack"):
        v2(lengths=[9000], overlong="drop")


def test_columns_of_arrow_that_hold_no_lists(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    with pytest.raises(ValueError, match=r"column input_ids of the data set is .*, not lists of tokens"):
        document_lengths(datasets.Dataset.from_dict({"input_ids": ["a b", "c"]}))
    missing = datasets.Dataset.from_dict({"input_ids": [[1, 2], None, [3]]})
    assert document_lengths(missing).tolist() == [2, 0, 1]


def test_register_takes_models_of_transformers():
    from multipack.ops.attention.foreign_attention import OLDEST, register

    pytest.importorskip("transformers", OLDEST, f"the attention needs transformers {OLDEST}")

    for given in (3, nn.Linear(2, 2), nn.Module):
        with pytest.raises(ValueError, match=r"does not support .*: give a model of transformers"):
            register(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (3, "plan_options must be a mapping, for example {'window': 8}, got 3"),
        (
            {"rank": 1, "capacity": 3},
            "plan_options has capacity, rank, which the arguments of the trainer decide",
        ),
    ],
)
def test_options_of_the_plan_that_a_trainer_decides(options, message):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from multipack.integrations.transformers import PackedTrainer

    with pytest.raises(ValueError) as caught:
        PackedTrainer(capacity=16, plan_options=options)
    assert message in str(caught.value)


def test_booleans_and_integers_of_any_width_are_accepted():
    made = row(labels=np.array([1, 2], dtype=np.int16), attention_mask=np.array([True, True]))
    assert made["labels"].tolist() == [[-100, 2]]
