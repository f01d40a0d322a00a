"""Both front ends behind one face, NumPy in and NumPy out, so that one test can hold for both."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from jax_topp import Replay
from jax_topp.reference import Cotangents

from cases import Case
from compare import to_numpy

VALUES = ("log_prob", "logsumexp", "support_entropy", "target_logit")


class JaxFrontend:
    """jax_topp under jit."""

    name = "jax"

    def replay(self, case: Case, **options: Any) -> Replay:
        import jax

        from jax_topp import replay

        mask = case.loss_mask
        f = jax.jit(
            lambda logits, targets, support, temperature, mask: replay(
                logits,
                targets,
                support,
                temperature=temperature,
                loss_mask=mask,
                vocab_size=case.vocab_size,
                **options,
            )
        )
        r = f(case.logits, case.targets, case.support, self._temperature(case), mask)
        return Replay(*(None if x is None else np.asarray(x) for x in r))

    def gradient(self, case: Case, cotangents: Cotangents, **options: Any) -> np.ndarray:
        import jax
        import jax.numpy as jnp

        import jax_topp

        def values(logits: Any) -> Any:
            r = jax_topp.replay(
                logits,
                case.targets,
                case.support,
                temperature=self._temperature(case),
                loss_mask=case.loss_mask,
                vocab_size=case.vocab_size,
                member_log_probs=True,
                **options,
            )
            return tuple(getattr(r, name) for name in VALUES), r.member_log_probs

        @jax.jit
        def pull(logits: Any, row_cotangents: Any, members: Any) -> Any:
            return jax.vjp(values, logits)[1]((row_cotangents, members))[0]

        rows = tuple(jnp.asarray(c) for c in cotangents[:4])
        return np.asarray(pull(jnp.asarray(case.logits), rows, cotangents.member_log_probs))

    def member_log_probs(self, case: Case) -> np.ndarray:
        import jax_topp

        options = {"loss_mask": case.loss_mask, "vocab_size": case.vocab_size}
        return np.asarray(
            jax_topp.member_log_probs(
                case.logits, case.support, temperature=self._temperature(case), **options
            )
        )

    def member_gradient(self, case: Case, members: np.ndarray) -> np.ndarray:
        import jax

        import jax_topp

        options = {"loss_mask": case.loss_mask, "vocab_size": case.vocab_size}

        def score(logits: Any) -> Any:
            return jax_topp.member_log_probs(
                logits, case.support, temperature=self._temperature(case), **options
            )

        return np.asarray(jax.vjp(score, jax.numpy.asarray(case.logits))[1](members)[0])

    def _temperature(self, case: Case) -> Any:
        return case.temperature


class TorchFrontend:
    """jax_topp.torch, eager."""

    name = "torch"

    def replay(self, case: Case, **options: Any) -> Replay:
        import jax_topp.torch as topp

        logits, targets, keywords = self._arguments(case)
        r = topp.replay(logits, targets, case.support, **keywords, **options)
        return Replay(*(None if x is None else to_numpy(x) for x in r))

    def gradient(self, case: Case, cotangents: Cotangents, **options: Any) -> np.ndarray:
        import torch

        import jax_topp.torch as topp

        logits, targets, keywords = self._arguments(case)
        logits.requires_grad_()
        r = topp.replay(logits, targets, case.support, member_log_probs=True, **keywords, **options)
        outputs = [*(getattr(r, name) for name in VALUES), r.member_log_probs]
        (gradient,) = torch.autograd.grad(outputs, logits, [to_torch(c) for c in cotangents])
        return to_numpy(gradient)

    def member_log_probs(self, case: Case) -> np.ndarray:
        import jax_topp.torch as topp

        logits, _, keywords = self._arguments(case)
        return to_numpy(topp.member_log_probs(logits, case.support, **keywords))

    def member_gradient(self, case: Case, members: np.ndarray) -> np.ndarray:
        import torch

        import jax_topp.torch as topp

        logits, _, keywords = self._arguments(case)
        logits.requires_grad_()
        scores = topp.member_log_probs(logits, case.support, **keywords)
        return to_numpy(torch.autograd.grad(scores, logits, to_torch(members))[0])

    def _arguments(self, case: Case) -> tuple[Any, Any, dict[str, Any]]:
        temperature = case.temperature
        if isinstance(temperature, np.ndarray):
            temperature = to_torch(temperature)
        mask = None if case.loss_mask is None else to_torch(case.loss_mask)
        keywords = {
            "temperature": temperature,
            "loss_mask": mask,
            "vocab_size": case.vocab_size,
        }
        return to_torch(case.logits), to_torch(case.targets), keywords


def to_torch(x: np.ndarray) -> Any:
    """A torch tensor with the same bits, of its own memory."""
    import torch

    x = np.array(x, order="C")
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

each_frontend = pytest.mark.parametrize(
    "frontend",
    [JaxFrontend(), pytest.param(TorchFrontend(), marks=needs_torch)],
    ids=lambda frontend: frontend.name,
)
