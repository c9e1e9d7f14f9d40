"""Sample from a policy's distribution as tensordict's ProbabilisticTensorDictModule does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from pycollect.data.devices import CPU, generator_state
from pycollect.data.layout import show_all
from pycollect.policy.program.steps import (
    CallStep,
    CannotUnwrapError,
    HeadStep,
    Tensors,
    preserve_state,
)
from pycollect.policy.program.tensordict_modules import torchrl_head_forward

Sampler: TypeAlias = Callable[..., Tensors]

_RANDOM = InteractionType.RANDOM


def head_sampler(step: HeadStep) -> Sampler:
    """Return a function from a distribution's parameters to its samples.

    The function also returns their log-probabilities if the head writes them. It builds and samples
    the distribution with the head's own methods, for the current interaction type, but without a
    TensorDict.
    """
    head = step.head
    names = tuple(key[-1] if isinstance(key, tuple) else key for key in head.dist_keys)
    # tensordict before 0.14 has no argument for a generator
    generator = getattr(head, "_generator", None)
    options = {} if generator is None else {"generator": generator}
    atomic = _atomic_sampler(step)

    def sample(*parameters: torch.Tensor) -> Tensors:
        kind = interaction_type() or step.default
        dist = head.distribution_class(
            **dict(zip(names, parameters, strict=True)), **head.distribution_kwargs
        )
        if atomic is not None and kind is _RANDOM:
            return atomic(dist)
        samples = _as_tuple(head._dist_sample(dist, interaction_type=kind, **options), step)
        return samples if step.log_prob_key is None else (*samples, dist.log_prob(*samples))

    return sample


def _atomic_sampler(step: HeadStep) -> Callable[[Any], Tensors] | None:
    """Return a function that draws a sample with its log-probability, as a head of TorchRL does.

    ``None`` for other heads. TorchRL's functions are taken from the globals of the head's
    `forward`, so that TorchRL is not imported.
    """
    forward = torchrl_head_forward(step.head)
    if forward is None or step.log_prob_key is None:
        return None
    names = getattr(inspect.unwrap(forward), "__globals__", {})
    if "sample_and_log_prob" not in names or "use_generator" not in names:
        raise CannotUnwrapError("a SafeProbabilisticModule with another way of sampling")
    draw, use_generator = names["sample_and_log_prob"], names["use_generator"]
    generator = getattr(step.head, "_generator", None)

    def atomic(dist: Any) -> Tensors:
        with use_generator(generator):
            out, log_prob = draw(dist, torch.Size(), reparameterize=dist.has_rsample)
        return (*_as_tuple(out, step), log_prob)

    return atomic


def _as_tuple(out: Any, step: HeadStep) -> Tensors:
    samples = (out,) if isinstance(out, torch.Tensor) else out
    if not isinstance(samples, tuple) or len(samples) != len(step.sample_keys):
        raise CannotUnwrapError(f"samples of {show_all(step.sample_keys)} are not tensors")
    return samples


def is_exact(
    function: Sampler,
    module: nn.Module,
    step: CallStep | HeadStep,
    inputs: Tensors,
    batch: tuple[int, ...] = (),
) -> bool:
    """Return whether a function over tensors equals the module's call with a TensorDict.

    The outputs and the states of random generators afterwards must be the same, bit for bit. The
    generators are restored. `inputs` are tensors of a real observation, in the order of the step's
    keys; `batch` is the TensorDict's batch size.
    """
    td = TensorDict(dict(zip(step.in_keys, inputs, strict=True)), batch_size=batch)
    device = inputs[0].device if inputs else CPU
    with preserve_state(module, device):
        out = module(td.clone())
        expected = tuple(out.get(key) for key in step.out_keys)
        after = _streams(device)
    with preserve_state(module, device):
        actual = function(*(tensor.clone() for tensor in inputs))
        same_stream = all(map(torch.equal, after, _streams(device)))
    return same_stream and same_bits(expected, actual)


def _streams(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the global generators that a distribution uses."""
    state = generator_state(device)
    return [torch.get_rng_state()] if state is None else [torch.get_rng_state(), state]


def same_bits(expected: Tensors, actual: Tensors) -> bool:
    """Return whether two tuples of tensors have the same length, shapes, dtypes and bits."""
    return len(expected) == len(actual) and all(
        a.shape == b.shape and a.dtype == b.dtype and _bytes(a) == _bytes(b)
        for a, b in zip(expected, actual, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


class CategoricalSampler:
    """Sample torch.distributions.Categorical: the same actions, log-probabilities and draws.

    The logits have a fixed dtype and shape, [n] or [P, n]. Each call overwrites the tensors of the
    last one. Interaction types other than RANDOM use the distribution itself. So do logits that
    torch refuses, so that torch's own error is raised.
    """

    def __init__(self, step: HeadStep, logits: torch.Tensor) -> None:
        self._general = head_sampler(step)
        self._default = step.default
        self._normal = torch.empty_like(logits)
        self._probs = torch.empty_like(logits)
        self._total = logits.new_empty((*logits.shape[:-1], 1))
        rows = self._probs.reshape(-1, logits.shape[-1])
        self._rows = rows
        self._drawn = torch.empty((rows.shape[0], 1), dtype=torch.int64, device="cpu")
        self._index = self._drawn.reshape(*logits.shape[:-1], 1)
        self._log_prob = torch.empty_like(self._total)
        action = self._index.squeeze(-1)
        self._actions = (action,)
        self._both = (action, self._log_prob.squeeze(-1))
        self._with_log_prob = step.log_prob_key is not None

    @staticmethod
    def fits(step: HeadStep, parameters: Tensors) -> bool:
        """Return whether a head is torch's Categorical over logits, without further options."""
        head = step.head
        return (
            head.distribution_class is torch.distributions.Categorical
            and tuple(head.dist_keys) == ("logits",)
            and not head.distribution_kwargs
            and getattr(head, "_generator", None) is None
            and len(step.sample_keys) == 1
            and parameters[0].ndim in (1, 2)
            and parameters[0].device.type == "cpu"
            and parameters[0].dtype in (torch.float32, torch.float64)
        )

    def __call__(self, logits: torch.Tensor) -> Tensors:
        """Return actions, int64 [] or [P], and their log-probabilities in the logits' dtype."""
        if (interaction_type() or self._default) is not _RANDOM:
            return self._general(logits)
        torch.logsumexp(logits, -1, True, out=self._total)
        torch.sub(logits, self._total, out=self._normal)
        torch.softmax(self._normal, -1, out=self._probs)
        try:
            torch.multinomial(self._rows, 1, True, out=self._drawn)
        except RuntimeError:
            return self._general(logits)
        if not self._with_log_prob:
            return self._actions
        torch.gather(self._normal, -1, self._index, out=self._log_prob)
        return self._both
