"""The count of Axolotl's examples, on configurations of two kinds."""

CONFIG = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "a/b", "type": "alpaca"}],
    "sample_packing": True,
    "micro_batch_size": 1,
}


def test_resolved_examples_are_counted_and_others_say_what_they_lack(script):
    reach = script("reach")
    changes = ({}, {"lisa_n_layers": 4}, {"sample_packing": False}, {"base_model": "ai21labs/Jamba-v0.1"})
    examples = [{"path": f"examples/{n}.yml", "config": {**CONFIG, **each}} for n, each in enumerate(changes)]
    figures = reach.count(examples)
    counts = {"examples": 4, "packing": 3, "own_decoder": 1, "with_hf": 1}
    assert {name: figures[name] for name in counts} == counts
    assert list(figures["lacking"]) == ["examples/1.yml", "examples/3.yml"]
    assert "| 1.yml | `lisa_n_layers`: " in reach.page(figures)
