"""The training program: a small mixture-of-experts language model on the user's own text.

Run it as ``dropless-train`` or ``python -m dropless.train``; ``--help`` lists the flags. It needs
the packages of the ``train`` extra (optax, orbax-checkpoint, grain, tensorboard, rich, matplotlib).

Reading order: ``cli`` (flags), ``config`` (presets and checks), ``text`` and ``data`` (what is
read), ``model`` and ``feed_forward`` (what is trained), ``step`` (one step), ``loop`` (all of
them), ``checkpoint``, ``metrics`` and ``report`` (what is left behind).
"""
