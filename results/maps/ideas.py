"""Ideas for better maps, each tried alone on development documents (docs/decisions/0009 and after).

    python results/maps/ideas.py [--only NAME ...]     # goes on where it was; ideas.json, then IDEAS.md

SmolLM2-135M, split 15 of 30. The exact model runs once over calibration text and documents, and its states
are kept; an idea is then a regression on kept states, and an evaluation that runs late layers of the tail alone. The
documents are those of `results/study` (its needles too): what was chosen here is judged by `forms.py` on others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "0")

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ridgefill import RidgeMaps, embedded, load_model
from ridgefill.compat import new_cache
from ridgefill.eval.loss import nats
from ridgefill.eval.losses import cut_nll, documents_of
from ridgefill.eval.masks import key, novel
from ridgefill.files import write_json, write_text
from ridgefill.fit.capture import layer_inputs
from ridgefill.fit.corpus import read_sources
from ridgefill.fit.reduce import reduce
from ridgefill.fit.solve import Spectrum
from ridgefill.fit.windows import MIN_WINDOW_ROWS, Cutter, plan_windows
from ridgefill.models.decoder import Decoder

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "study"))
import study  # noqa: E402

SPLIT, TAIL, TOKENS, LEADING = 15, 768, 2560, 16
NEEDLE_TAIL = 256
CALIBRATION = 65536
EACH = 2  # documents of a domain, prompts of a cell
GRID = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
KEPT = HERE.parent.parent / ".cache" / "ideas"


@dataclass
class Text:
    """Rows of exact runs.

    Attributes:
        h: layer -> states [n, d], of layers 0 .. L-1.
        ids: [n].
        lengths: rows of each window.
    """

    h: dict[int, Tensor]
    ids: Tensor
    lengths: list[int]


@dataclass
class Probe:
    """A document or a prompt with its answer, run exactly.

    Attributes:
        kind: domain or needle cell.
        scored: how many last tokens are scored.
        nll: [scored] exact's nats; logp [scored, V] its log-probabilities, of documents.
        sets: "novel" and "key" masks [scored], of documents.
        kv: layer -> keys (rotated) and values [H, n, D].
    """

    kind: str
    ids: Tensor
    tail: int
    scored: int
    h: dict[int, Tensor]
    kv: list[tuple[Tensor, Tensor]]
    nll: Tensor
    logp: Tensor | None = None
    sets: dict[str, Tensor] = field(default_factory=dict)


class Bench:
    """The model, calibration states and probes, made once and kept on disk."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_model(embedded.default_model())
        self.decoder = Decoder(self.model)
        self.late = range(SPLIT + 1, self.decoder.n_layers)
        maps = RidgeMaps.load(study.maps_folder("smollm2", SPLIT, self.model, self.tokenizer))
        self.fitted = set(maps.provenance["fitted_documents"])
        self.plain = maps
        KEPT.mkdir(parents=True, exist_ok=True)
        self.fit, self.held = self._kept("states.pt", self._states)
        probes: list[Probe] = self._kept("probes.pt", self._probes)
        seen: Counter[str] = Counter()
        self.probes = [p for p in probes if not seen.update([p.kind]) and seen[p.kind] <= EACH]
        self.targets = {
            i: tuple(self.written(i, part.h[i]) for part in (self.fit, self.held)) for i in self.late
        }

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        path = KEPT / name
        if not path.exists():
            torch.save(make(), path)
        return torch.load(path, weights_only=False, mmap=True)

    def written(self, i: int, x: Tensor) -> Tensor:
        """What layer i writes of true inputs [n, d]: keys before rotary embedding, then values."""
        return self.decoder.target(i, x[None], "writes")[0]

    def _states(self) -> tuple[Text, Text]:
        cutter = Cutter(
            self.tokenizer, length=4096, shortest=LEADING + MIN_WINDOW_ROWS, chat_share=0.25, seed=0
        )
        sources = read_sources(list(embedded.texts().values()))
        plan = plan_windows(sources, cutter, tokens=CALIBRATION, holdout=0.1, leading=LEADING, width=576)
        found = []
        for windows in (plan.fit, plan.heldout):
            h: dict[int, list[Tensor]] = {i: [] for i in range(self.decoder.n_layers)}
            for window in windows:
                for i, _, x in layer_inputs(
                    self.decoder, window.ids.long()[None], 0, self.decoder.n_layers - 1
                ):
                    h[i].append(x[0, LEADING:].clone())
            ids = torch.cat([w.ids.long()[LEADING:] for w in windows])
            lengths = [len(w.ids) - LEADING for w in windows]
            found.append(Text({i: torch.cat(parts) for i, parts in h.items()}, ids, lengths))
        return found[0], found[1]

    def _probes(self) -> list[Probe]:
        domains: dict[str, Sequence[str | Path]] = {
            "prose": embedded.held_out(),
            "documentation": [embedded.doc_texts()],
            "code": [embedded.code_texts()],
        }
        documents = documents_of(self.tokenizer, domains, TOKENS, 3, fitted=self.fitted, seed=0)
        found = [self._document(d.stratum, d.ids) for d in documents]
        for _, cell, item in study.needle_items("smollm2", self.tokenizer, self.plain):
            ids, k = torch.cat([item.ids, item.answer_ids], 1), item.answer_ids.shape[1]
            found.append(self._run(cell, ids, NEEDLE_TAIL + k - 1, k)[0])
        return found

    def _run(self, kind: str, ids: Tensor, tail: int, scored: int) -> tuple[Probe, Tensor]:
        decoder, cache = self.decoder, new_cache(self.model)
        h, states = decoder.embed(ids[:, :-1]), {}
        rows = decoder.rows(h, torch.arange(ids.shape[1] - 1)[None], None, cache, ids[:, :-1])
        for i in range(decoder.n_layers):
            states[i] = h[0]
            h = decoder.run_layer(i, h, rows, cache)
        kv = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
        nll = nats(decoder, h[:, -scored:], ids)
        return Probe(kind, ids, tail, scored, {i: states[i] for i in range(SPLIT + 1)}, kv, nll), h

    def _document(self, kind: str, ids: Tensor) -> Probe:
        probe, h = self._run(kind, ids, TAIL - 1, TAIL - 1)
        probe.logp = self.decoder.final(h[:, -(TAIL - 1) :])[0].log_softmax(-1).half()
        cut = cut_nll(self.decoder, ids, TAIL - 1, TAIL)
        probe.sets = {"novel": novel(ids[0])[-(TAIL - 1) :], "key": key(probe.nll, cut)}
        return probe

    # --- what an idea is judged by

    def judge(self, give: Callable[[int, dict[int, Tensor]], Tensor], **splice: Any) -> dict[str, float]:
        """Added nats on novel and key tokens and KL, means over documents; added nats of a needle's answer, and how
        many are found.

        Args:
            give: layer and states {layer: [m, d]} of the prefix -> what the layer writes of it, [m, 2 H D].
            splice: "keys" or "values": layers whose keys or values are exact all the same.
        """
        documents, needles = [], []
        for probe in self.probes:
            logp = self._arm(probe, give, **splice)
            target = probe.ids[0, -probe.scored :]
            added = -logp.gather(1, target[:, None])[:, 0] - probe.nll
            if probe.logp is not None:
                exact = probe.logp.float()
                kl = (exact.exp() * (exact - logp)).sum(-1).mean()
                sets = {k: added[mask].mean() if mask.any() else None for k, mask in probe.sets.items()}
                documents.append(sets | {"kl": kl, probe.kind: sets["novel"]})
            else:
                needles.append((added.mean(), bool((logp.argmax(-1) == target).all())))
        found = {}
        for name in ("novel", "key", "kl", "prose", "documentation", "code"):
            values = [float(d[name]) for d in documents if d.get(name) is not None]
            found[name] = sum(values) / len(values)
        found["answer"] = float(sum(a for a, _ in needles) / len(needles))
        return found | {"needles": sum(ok for _, ok in needles), "of": len(needles)}

    def _arm(
        self,
        probe: Probe,
        give: Callable[[int, dict[int, Tensor]], Tensor],
        keys: Sequence[int] = (),
        values: Sequence[int] = (),
    ) -> Tensor:
        decoder, n = self.decoder, probe.ids.shape[1] - 1
        m = n - probe.tail
        states = {i: h[:m] for i, h in probe.h.items()}
        positions = torch.arange(n)[None]
        prefix = decoder.rows(states[0][None], positions[:, :m])
        cache = new_cache(self.model)
        for i, (k, v) in enumerate(probe.kv):
            k, v = k[:, :m].clone(), v[:, :m].clone()
            if i in self.late:
                own_k, own_v = decoder.finish(i, give(i, states)[None], prefix)
                if i not in keys:
                    k[:, LEADING:] = own_k[0, :, LEADING:]
                if i not in values:
                    v[:, LEADING:] = own_v[0, :, LEADING:]
            cache.update(k[None], v[None], i)
        h = probe.h[SPLIT][None, m:]
        rows = decoder.rows(h, positions[:, m:], None, cache, probe.ids[:, m:-1])
        for i in range(SPLIT, decoder.n_layers):
            h = decoder.run_layer(i, h, rows, cache)
        return decoder.final(h[:, -probe.scored :])[0].log_softmax(-1)


# --- features and regressions

Feature = Callable[[dict[int, Tensor], list[int] | None], Tensor]


def unit(h: Tensor) -> Tensor:
    """h / rms(h)."""
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


def state(i: int) -> Feature:
    """A layer's entering state, normed."""
    return lambda h, _: unit(h[i])


def raw(i: int) -> Feature:
    """The same as it is."""
    return lambda h, _: h[i]


def before(i: int, back: int = 1) -> Feature:
    """The normed state of the row ``back`` rows before."""

    def shifted(h: dict[int, Tensor], lengths: list[int] | None) -> Tensor:
        parts = unit(h[i]).split(lengths or len(h[i]))
        return torch.cat([torch.cat([p[:1].expand(back, -1), p[:-back]]) for p in parts])

    return shifted


def random_features(i: int, count: int) -> Feature:
    """ReLU of random projections of the normed state."""
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(576, count, generator=g) / 24, torch.randn(count, generator=g) / 2
    return lambda h, _: torch.relu(unit(h[i]) @ weight + bias)


def product(i: int, j: int) -> Feature:
    """Element by element."""
    return lambda h, _: unit(h[i]) * unit(h[j])


@dataclass
class Regression:
    """Ridge regressions of every late layer on features, in closed form.

    Attributes:
        features: what is read.
        gives: "writes", or "inputs", which are then projected.
        weight: layer -> weights of the rows [n], or None.
        per_layer: the penalty is chosen for each layer, not for all.
        prior: the map shrinks to the identity instead of zero (inputs from the raw split state only).
        rows: how many calibration rows are used; None: all.
        every: of these, every how many-th.
        penalties: to choose from.
    """

    bench: Bench
    features: Sequence[Feature]
    gives: str = "writes"
    weight: Callable[[int], Tensor] | None = None
    per_layer: bool = False
    prior: bool = False
    rows: int | None = None
    every: int = 1
    penalties: Sequence[float] = GRID

    def read(self, h: dict[int, Tensor], lengths: list[int] | None = None) -> Tensor:
        """[n, K]."""
        return torch.cat([feature(h, lengths) for feature in self.features], 1)

    def fit(self) -> Regression:
        """Solves; ``self.penalty`` and ``self.explained`` say what came of it."""
        bench, used = self.bench, slice(None, self.rows, self.every)
        x = self.read(bench.fit.h, bench.fit.lengths)[used]
        held = self.read(bench.held.h, bench.held.lengths)
        self.mean = x.mean(0)
        x, held = x - self.mean, held - self.mean
        errors: dict[int, dict[float, float]] = {}
        solved: dict[int, tuple[Tensor, Tensor]] = {}
        self.spectrum = Spectrum.of((x.T @ x).double())
        self.bases, self.means = {}, {}
        for i in bench.late:
            spectrum, own = self.spectrum, x
            y, wanted = (self._target(i, part) for part in (bench.fit, bench.held))
            y = y[used]
            if self.weight is not None:
                w = self.weight(i)[used, None]
                own, y_mean = x * w.sqrt(), (w * y).sum(0) / w.sum()
                spectrum = Spectrum.of((own.T @ own).double())
                y_centred = (y - y_mean) * w.sqrt()
            else:
                y_mean = y.mean(0)
                y_centred = y - y_mean
            if self.prior:
                y_centred, wanted = y_centred - x, wanted - held
            basis = (y_centred.T @ own).double() @ spectrum.vectors
            self.bases[i], self.means[i] = basis, y_mean
            z = held @ spectrum.vectors.float()
            spread = float((wanted - wanted.mean(0)).square().sum())
            errors[i], solved[i] = {}, (basis, spectrum.vectors)
            for value in self.penalties:
                predicted = z @ (basis * spectrum.shrinkage(value)).float().T + y_mean
                errors[i][value] = float((predicted - wanted).square().sum()) / spread
            self._spectra = getattr(self, "_spectra", {}) | {i: spectrum}
        best = min(self.penalties, key=lambda v: sum(e[v] for e in errors.values()))
        self.maps = {}
        self.penalty = {i: min(e, key=e.get) if self.per_layer else best for i, e in errors.items()}
        for i, (basis, vectors) in solved.items():
            weight = ((basis * self._spectra[i].shrinkage(self.penalty[i])) @ vectors.T).float()
            if self.prior:
                weight = weight + torch.eye(len(weight))
            self.maps[i] = weight
        self.explained = 1 - sum(errors[i][self.penalty[i]] for i in errors) / len(errors)
        return self

    def reduced(self, columns: int) -> Regression:
        """The same with a reduction that all layers share."""
        value = next(iter(self.penalty.values()))
        down, maps = reduce(
            self.spectrum, self.bases, value, columns, dict.fromkeys(self.bases, 2), len(self.bench.fit.ids)
        )
        self.maps = {i: (w @ down).float() for i, w in maps.items()}
        return self

    def _target(self, i: int, part: Text) -> Tensor:
        if self.gives == "inputs":
            return part.h[i]
        return self.bench.targets[i][0 if part is self.bench.fit else 1]

    def give(self, i: int, h: dict[int, Tensor]) -> Tensor:
        """What layer i writes of the rows."""
        given = (self.read(h) - self.mean) @ self.maps[i].T + self.means[i]
        return given if self.gives == "writes" else self.bench.written(i, given)


class Clustered:
    """A map for each cluster of the normed split state, shrunk to the map of all."""

    def __init__(self, bench: Bench, features: Sequence[Feature], clusters: int) -> None:
        self.base = Regression(bench, features).fit()
        x = unit(bench.fit.h[SPLIT])
        g = torch.Generator().manual_seed(0)
        self.centres = x[torch.randperm(len(x), generator=g)[:clusters]]
        for _ in range(20):
            own = torch.cdist(x, self.centres).argmin(1)
            self.centres = torch.stack([x[own == c].mean(0) for c in range(clusters)])
        self.own: list[dict[int, Tensor]] = []
        read = self.base.read(bench.fit.h, bench.fit.lengths) - self.base.mean
        for c in range(clusters):
            rows = own == c
            part = read[rows]
            spectrum = Spectrum.of((part.T @ part).double())
            found = {}
            for i in bench.late:
                left = bench.targets[i][0][rows] - self.base.means[i] - part @ self.base.maps[i].T
                basis = (left.T @ part).double() @ spectrum.vectors
                found[i] = ((basis * spectrum.shrinkage(0.3)) @ spectrum.vectors.T).float()
            self.own.append(found)

    def give(self, i: int, h: dict[int, Tensor]) -> Tensor:
        """What layer i writes of the rows."""
        given, read = self.base.give(i, h), self.base.read(h) - self.base.mean
        own = torch.cdist(unit(h[SPLIT]), self.centres).argmin(1)
        for c, maps in enumerate(self.own):
            given[own == c] += read[own == c] @ maps[i].T
        return given


class Fused:
    """The paper's maps folded into keys and values: W diag(g) (A h + b) / rms, the root mean square by a factor.

    Attributes:
        columns: of the factor of A; None takes all, 0 the mean over calibration rows.
    """

    def __init__(self, bench: Bench, columns: int | None) -> None:
        self.bench, self.maps, self.factors = bench, {}, {}
        for i in bench.late:
            m, layer = bench.plain.maps[i], bench.decoder.layers[i]
            both = torch.cat([layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])
            folded = both * layer.input_layernorm.weight
            self.maps[i] = (folded @ m.weight, folded @ m.bias)
            given = m(bench.fit.h[SPLIT][:8192])
            second = given.T @ given / len(given)
            vectors = torch.linalg.eigh(second.double())[1].flip(1)[:, :columns].float()
            rest = float(second.trace() - (vectors.T @ second @ vectors).trace())
            self.factors[i] = (vectors.T @ m.weight, vectors.T @ m.bias, rest)

    def give(self, i: int, h: dict[int, Tensor]) -> Tensor:
        """What layer i writes of the rows."""
        weight, bias = self.maps[i]
        factor, start, rest = self.factors[i]
        square = ((h[SPLIT] @ factor.T + start).square().sum(-1, keepdim=True) + rest) / 576
        return (h[SPLIT] @ weight.T + bias) * torch.rsqrt(square + self.bench.model.config.rms_norm_eps)


def received(bench: Bench, i: int, chunk: int = 512) -> Tensor:
    """The attention that calibration rows receive in layer i of their windows, over its mean; at least a tenth.

    Leading rows are not kept: attention is shared out among the others.
    """
    config, layer, found = bench.model.config, bench.decoder.layers[i], []
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    for h in bench.fit.h[i].split(bench.fit.lengths):
        x, n = layer.input_layernorm(h)[None], len(h)
        rows = bench.decoder.rows(x, torch.arange(LEADING, LEADING + n)[None])
        keys = bench.decoder.finish(i, bench.written(i, h)[None], rows)[0][0]
        q = layer.self_attn.q_proj(x).view(1, n, heads, -1).transpose(1, 2)
        q = apply_rotary_pos_emb(q, q, *rows.ropes)[0][0].unflatten(0, (-1, groups))  # [H_kv, groups, n, D]
        got = torch.zeros(n)
        for at in range(0, n, chunk):
            scores = q[:, :, at : at + chunk] @ keys[:, None].mT / keys.shape[-1] ** 0.5
            later = torch.arange(n) > torch.arange(at, min(at + chunk, n))[:, None]
            got += scores.masked_fill(later, -torch.inf).softmax(-1).sum((0, 1, 2))
        found.append(got)
    every = torch.cat(found)
    return (every / every.mean()).clamp_min(0.1)


LOWER = (state(SPLIT), state(10), state(5), state(0))
RICH = (*LOWER, before(SPLIT))


def ideas(b: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> what tries it."""
    plain = (raw(SPLIT),)

    def tried(*features: Feature, **how: Any) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            found = Regression(b, features, **how).fit()
            return {"explained": found.explained, "penalty": found.penalty[20]} | b.judge(found.give)

        return run

    def spliced(**splice: Any) -> Callable[[], dict[str, Any]]:
        return lambda: b.judge(lambda i, h: b.written(i, b.plain.predict(i, h[SPLIT])), **splice)

    @cache
    def rich() -> Regression:
        return Regression(b, RICH).fit()

    def whole() -> dict[str, Any]:
        return {"explained": rich().explained, "penalty": rich().penalty[20]} | b.judge(rich().give)

    def reduced(columns: int) -> Callable[[], dict[str, Any]]:
        return lambda: b.judge(rich().reduced(columns).give)

    inverse_square = lambda i: 1 / b.fit.h[i].square().mean(-1)  # noqa: E731
    attended = lambda i: received(b, i)  # noqa: E731
    late = list(b.late)
    found = {
        "plain": tried(*plain, gives="inputs"),
        "plain, penalty per layer": tried(*plain, gives="inputs", per_layer=True),
        "plain, rows weighted by 1 / rms^2": tried(*plain, gives="inputs", weight=inverse_square),
        "plain, 2,048 rows": tried(*plain, gives="inputs", rows=2048),
        "plain to the identity, 2,048 rows": tried(*plain, gives="inputs", prior=True, rows=2048),
        "plain to the identity": tried(*plain, gives="inputs", prior=True),
        "fused, all columns": lambda: b.judge(Fused(b, None).give),
        "fused, factor of 32 columns": lambda: b.judge(Fused(b, 32).give),
        "fused, one scalar": lambda: b.judge(Fused(b, 0).give),
        "direct, raw state": tried(*plain),
        "direct": tried(state(SPLIT)),
        "direct, rows weighted by attention": tried(state(SPLIT), weight=attended),
        "direct, 4 clusters": lambda: b.judge(Clustered(b, (state(SPLIT),), 4).give),
        "direct, 8 clusters": lambda: b.judge(Clustered(b, (state(SPLIT),), 8).give),
        "direct + embedding": tried(state(SPLIT), state(0)),
        "direct + layer 8": tried(state(SPLIT), state(8)),
        "direct + 3 lower": tried(*LOWER),
        "direct + row before": tried(state(SPLIT), before(SPLIT)),
        "direct + 3 rows before": tried(state(SPLIT), *(before(SPLIT, k) for k in (1, 2, 3))),
        "direct + 1,152 random features": tried(state(SPLIT), random_features(SPLIT, 1152)),
        "direct + product with the embedding": tried(state(SPLIT), product(SPLIT, 0)),
        "rich: 3 lower + row before": whole,
        "rich, inputs": tried(*RICH, gives="inputs"),
    }
    for columns in (864, 576, 384, 192, 96):
        found[f"rich, {columns} columns"] = reduced(columns)
    for every in (2, 3, 4):
        found[f"rich, every row of {every}"] = tried(*RICH, every=every)
    for value in (0.1, 0.3):
        found[f"rich, penalty {value:g}"] = tried(*RICH, penalties=(value,))
    found["rich, every row of 2, penalty 0.1"] = tried(*RICH, every=2, penalties=(0.1,))
    found["rich, the first half of the rows"] = tried(*RICH, rows=len(b.fit.ids) // 2)
    found["rich + embedding before"] = tried(*RICH, before(0))
    found["rich + 2 rows further back"] = tried(*RICH, before(SPLIT, 2), before(SPLIT, 3))
    found |= {
        "plain, exact keys": spliced(keys=late),
        "plain, exact values": spliced(values=late),
    }
    for i in late:
        found[f"plain, exact keys in {i}"] = spliced(keys=[i])
    return found


COLUMNS = (
    "explained",
    "penalty",
    "novel",
    "prose",
    "documentation",
    "code",
    "key",
    "kl",
    "answer",
    "needles",
)


def page(done: dict[str, dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = [
        __doc__.split("\n\n")[0],
        "",
        (HERE / "IDEAS.txt").read_text() if (HERE / "IDEAS.txt").exists() else "",
    ]
    lines += ["| idea | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in done.items():
        cells = []
        for column in COLUMNS:
            value = row.get(column)
            if column == "needles":
                cells.append(f"{value} of {row['of']}")
            else:
                cells.append(
                    "" if value is None else f"{value:.3g}" if column == "penalty" else f"{value:.4f}"
                )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> None:
    """Every idea that has not been tried."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of ideas")
    given = parser.parse_args()
    path = HERE / "ideas.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    bench = Bench()
    every = ideas(bench)
    for name in given.only or every:
        if name not in done:
            done[name] = every[name]()
            print(f"{name}: {done[name]}", flush=True)
            write_json(path, {k: done[k] for k in every if k in done})
    write_text(HERE / "IDEAS.md", page({k: done[k] for k in every if k in done}))


if __name__ == "__main__":
    main()
