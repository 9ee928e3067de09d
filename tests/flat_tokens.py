"""Tokens of documents as `SharedPrefixes` takes them."""

import numpy as np

from multipack.data.views.shared_prefixes import FlatTokens
from multipack.planning.lengths import offsets_of


def flat_tokens(documents):
    """The tokens of documents that are lists of token numbers below 65,536."""
    lengths = np.array([len(each) for each in documents])
    tokens = np.concatenate([np.asarray(each) for each in documents]).astype(np.uint16)
    return FlatTokens(tokens, offsets_of(lengths)[:-1], lengths)
