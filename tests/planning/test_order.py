"""The seeded order: pinned, so that a plan made today is the plan made tomorrow."""

import hashlib

import numpy as np

from multipack.planning.order import BLOCKS, keys, permutation


def plain_key(seed, epoch, number, stream=0):
    mask = (1 << 64) - 1

    def mix(z):
        z &= mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    start = mix(mix(mix(seed + golden) + epoch + golden) + stream + golden)
    return mix(start + golden * (number + 1))


def test_keys_follow_the_definition():
    for seed, epoch in ((0, 0), (-3, 7), (2**70, 1)):
        made = keys(seed, epoch, np.array([0, 1, 2**40]))
        assert made.tolist() == [plain_key(seed, epoch, number) for number in (0, 1, 2**40)]


def test_splitmix64_reference():
    # the generator's published first output for seed 0 is the key of number 0 on a start of 0
    assert plain_key.__code__ is not None
    z = 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    assert z ^ (z >> 31) == 0xE220A8397B1DCDAF


def test_golden_order():
    order = permutation(0, 0, 100_000)
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16] == "f1e1d129caa87552"
    assert order[:5].tolist() == [4894, 91590, 1038, 80218, 92010]


def test_it_is_a_permutation_of_its_own():
    orders = [permutation(s, e, 1000, k) for s, e, k in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, BLOCKS))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    for a in range(4):
        for b in range(a):
            agree = (orders[a] == orders[b]).sum()
            assert agree < 10


def test_places_are_even():
    mean = np.mean([permutation(seed, 0, 50) for seed in range(400)], axis=0)
    assert abs(mean - 24.5).max() < 4.0
