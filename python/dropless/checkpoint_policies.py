"""Policies for ``jax.checkpoint``: which of the layer's arrays to keep, not recompute.

The arrays are named ``dropless_x`` (the layer's input, [T, H]), ``dropless_routing`` (logits,
weights and index maps: about T * (4E + 12K) bytes) and ``dropless_h`` (the experts'
pre-activations, [M, 2, I]). Combine with others by
``jax.checkpoint_policies.save_from_both_policies``.
"""

from __future__ import annotations

import jax

_save = jax.checkpoint_policies.save_only_these_names

# Recomputes the up product, which gives h back.
save_routing = _save("dropless_routing")
# Recomputes no expert product and no routing; x comes from what precedes the layer.
save_routing_and_h = _save("dropless_routing", "dropless_h")
# Recomputes nothing of the layer.
save_all = _save("dropless_routing", "dropless_h", "dropless_x")
