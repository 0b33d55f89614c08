"""onnxruntime's operators that generate text: a decoder is an attribute, which runs once for each token.

The first run is part of the program around; the others are a loop on the host. What a strategy carries from one token
to the next (`State`) is arrays: finished beams are so many sequences that are as long as any may be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxc.errors import ModelError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.ops.activation import log_softmax_13
from onnxc.ops.com_microsoft import MS
from onnxc.ops.com_microsoft_tokens import without_repeated
from onnxc.ops.control import iterate, lower, scalar
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder, constant_of
from onnxc.primitives.host import on_host

GPT, ENCODER_DECODER, WHISPER = 0, 1, 2
MOST_BEAMS, MOST_WORDS = 128, 4096  # as in onnxruntime
NEVER = float(np.finfo(np.float32).min)  # the score of a word that is not to come
OTHER_BEAMS = -1e9  # at first, when all beams are the same
HIDDEN_STATES = "encoder_hidden_states"  # as onnxruntime calls them

Decoder = Callable[[Builder, Value, Value, list[Value]], "tuple[Value, list[Value]]"]
"""(builder, last words [rows, 1], sequences [rows, length], caches) to (logits [rows, n, words], caches)."""


@dataclass
class Rules:
    """What changes scores before a word is chosen.

    Attributes:
        end: the word that ends a sequence.
        fill: the word behind an end.
        words: how many words there are, where the decoder has more logits; 0 for all.
        no_repeat: n-grams of this size do not come twice; 0 for any.
        least: the length below which no sequence ends, a scalar.
        repetition: the penalty of words that were there.
        allowed: which words may come [words], `allowed_first` [batch, words] at first.
        temperature: that scores are divided by.
        presence: what is taken off scores [batch, words].
        beams: how many rows of scores an input has.
    """

    end: int
    fill: int
    words: int
    no_repeat: int
    least: Value | None = None
    repetition: Value | None = None
    allowed: Value | None = None
    allowed_first: Value | None = None
    temperature: float = 1.0
    presence: Value | None = None
    beams: int = 1

    def __post_init__(self) -> None:
        if self.end < 0 or self.fill < 0:
            raise ModelError(f"the eos_token_id {self.end} and the pad_token_id {self.fill} must not be negative")

    def apply(self, b: Builder, scores: Value, sequences: Value, first: bool) -> Value:
        """Scores [rows, words], after sequences [rows, length]."""
        known = constant_of(self.repetition)
        if self.repetition is not None and (known is None or known.ravel().tolist() != [1.0]):
            penalty, at = scalar(b, self.repetition), b.cast(sequences, dtypes.int64)
            old = b.one("gather_elements", scores, at, axis=1)
            new = b.where(b.lt(old, 0.0), b.mul(old, penalty), b.div(old, penalty))
            scores = b.one("scatter_elements", scores, at, new, axis=1, reduction="none")
        if self.no_repeat > 0:
            scores = without_repeated(b, sequences, scores, self.no_repeat, NEVER)
        for mask in (self.allowed, self.allowed_first if first else None):
            if mask is not None:
                each = b.reshape(mask, (1, *mask.shape)) if mask.rank == 1 else repeated(b, mask, self.beams)
                scores = b.where(b.eq(each, 0), NEVER, scores)
        if self.least is not None:
            short = b.lt(b.size_as(sequences.shape[1], dtypes.int64), b.cast(scalar(b, self.least), dtypes.int64))
            ends = b.eq(b.iota(scores.shape[1]), self.end)
            scores = b.where(b.and_(short, ends), NEVER, scores)
        if self.temperature not in (0.0, 1.0):
            scores = b.div(scores, self.temperature)
        return scores if self.presence is None else b.sub(scores, self.presence)


def repeated(b: Builder, x: Value, times: int) -> Value:
    """Each row as often as it has beams: [batch, ...] as [batch * beams, ...]."""
    if times == 1:
        return x
    wide = b.expand(b.reshape(x, (x.shape[0], 1, *x.shape[1:])), (x.shape[0], times, *x.shape[1:]))
    return b.reshape(wide, (x.shape[0] * times, *x.shape[1:]))


State = list[Value]


class Strategy(ABC):
    """How the next words are chosen."""

    rules: Rules

    @abstractmethod
    def begin(self, b: Builder, batch: Dim, most: Dim, words: Dim) -> State:
        """What is carried, before the first word; `most` is the length of the longest sequence, `words` how many words
        there are.
        """

    @abstractmethod
    def choose(
        self, b: Builder, logits: Value, sequences: Value, state: State, first: bool
    ) -> tuple[Value, Value | None, State, list[Value], Value]:
        """The next words [rows], the rows they go on (None: each its own), the state, what is collected, whether to
        go on.
        """


@dataclass
class Greedy(Strategy):
    """The word of the greatest score."""

    rules: Rules

    def begin(self, b: Builder, batch: Dim, most: Dim, words: Dim) -> State:
        return [b.full((batch,), b.scalar(False, dtypes.boolean), dtypes.boolean)]

    def choose(
        self, b: Builder, logits: Value, sequences: Value, state: State, first: bool
    ) -> tuple[Value, Value | None, State, list[Value], Value]:
        done, *rest = state
        words, rest = self.pick(b, self.rules.apply(b, logits, sequences, first), rest)
        words = b.reshape(words, (logits.shape[0],))
        done = b.or_(done, b.eq(words, self.rules.end))
        words = b.where(done, b.scalar(self.rules.fill, dtypes.int32), words)
        return words, None, [done, *rest], [], b.not_(_all(b, done))

    def pick(self, b: Builder, scores: Value, state: State) -> tuple[Value, State]:
        """The words of scores [rows, words]."""
        return b.cast(b.one("argmax", scores, axis=1, last=False), dtypes.int32), state


@dataclass
class Drawn(Greedy):
    """A word that is drawn from the most probable ones, which together have a probability of `share`.

    The numbers are those of onnxruntime on Linux: two of C++'s minstd_rand0 for each.
    """

    seed: Value
    share: float
    least: int
    filter_value: float
    custom: bool

    def begin(self, b: Builder, batch: Dim, most: Dim, words: Dim) -> State:
        scores = b.full((batch, words), 0.0, dtypes.float32)
        seed = b.binary("mod", b.cast(scalar(b, self.seed), dtypes.int64), b.scalar(2**31 - 1, dtypes.int64))
        seed = b.where(b.eq(seed, 0), b.scalar(1, dtypes.int64), seed)
        return [*super().begin(b, batch, most, words), seed, scores]

    def pick(self, b: Builder, scores: Value, state: State) -> tuple[Value, State]:
        types = [TensorType(dtypes.int32, (scores.shape[0],)), scores.t, state[0].t]
        words, filtered, seed = on_host(
            b, "ms_draw_tokens", [scores, state[0]], types, share=self.share, least=self.least,
            filter_value=self.filter_value, custom=self.custom,
        )  # fmt: skip
        return words, [seed, filtered]


def _all(b: Builder, x: Value) -> Value:
    return b.eq(b.reduce("min", b.cast(x, dtypes.int32), range(x.rank)), 1)


@dataclass
class Beams(Strategy):
    """The best of several beams for each input, `beams` of them."""

    rules: Rules
    early: bool
    penalty: Value
    scores: bool = False

    def begin(self, b: Builder, batch: Dim, most: Dim, words: Dim) -> State:
        n = self.rules.beams
        first = b.constant(np.array([0.0, *[OTHER_BEAMS] * (n - 1)], np.float32))
        sums = b.reshape(b.expand(first, (batch, n)), (batch * n,))
        kinds = [((batch, n, most), dtypes.int32), ((batch, n), dtypes.int32), ((batch, n), dtypes.float32)]
        kept = [b.full(shape, b.scalar(0, kind), kind) for shape, kind in [*kinds, ((batch,), dtypes.int32)]]
        return [sums, *kept, b.full((batch,), b.scalar(False, dtypes.boolean), dtypes.boolean)]

    def choose(
        self, b: Builder, logits: Value, sequences: Value, state: State, first: bool
    ) -> tuple[Value, Value | None, State, list[Value], Value]:
        sums, *kept = state
        rows, words = logits.shape
        batch = kept[-1].shape[0]
        scores = self.rules.apply(b, log_softmax_13(b, logits), sequences, first)
        scores = b.add(scores, b.reshape(sums, (rows, 1)))
        flat = b.reshape(scores, (batch, words * self.rules.beams))
        best, picks = b.emit("top_k", [flat], {"k": 2 * self.rules.beams, "axis": 1, "largest": True})
        if not isinstance(words, int):
            raise UnsupportedError("a decoder whose number of words is not known is not supported")
        types = [sums.t, TensorType(dtypes.int32, (rows,)), TensorType(dtypes.int64, (rows,)), *(v.t for v in kept)]
        sums, tokens, places, *kept = on_host(
            b, "ms_beam_step", [best, picks, sequences, *kept, self.penalty], types, words=words,
            end=self.rules.end, fill=self.rules.fill, early=self.early,
        )  # fmt: skip
        results = [b.reshape(scores, (batch, self.rules.beams, words))] if self.scores else []
        return tokens, places if self.rules.beams > 1 else None, [sums, *kept], results, b.not_(_all(b, kept[-1]))


@dataclass
class Generated:
    """What :func:`generate` gives: sequences [rows, length], the last state, what was collected [steps, ...]."""

    sequences: Value
    state: State
    results: list[Value]


def generate(
    b: Builder, strategy: Strategy, logits: Value, sequences: Value, caches: list[Value], axis: int, batch: Dim,
    most: Dim, decoder: Decoder,
) -> Generated:  # fmt: skip
    """Words after words, until the strategy or the greatest length, `most`, says that it is enough.

    Args:
        logits: of the words behind `sequences` [rows, length].
        caches: what the decoder needs of earlier words, whose axis of rows is `axis`.
        batch: how many inputs there are; rows are as many, or as many for each beam.
    """
    if logits.rank != 3 or (isinstance(logits.shape[2], int) and strategy.rules.words > logits.shape[2]):
        raise ModelError(
            f"the decoder gives logits {logits.t}; wanted are those of {strategy.rules.words or 'all'} words"
        )
    words = strategy.rules.words or logits.shape[2]
    state = strategy.begin(b, batch, most, words)

    def extended(
        b: Builder, logits: Value, sequences: Value, caches: list[Value], state: State, first: bool
    ) -> tuple[Value, list[Value], list[Value]]:
        n = logits.shape[1]
        last = b.slice(b.slice(logits, 1, n - 1, n), 2, 0, words)
        scores = b.reshape(b.cast(last, dtypes.float32), (logits.shape[0], words))
        chosen, places, state, results, go = strategy.choose(b, scores, sequences, state, first)
        if places is not None:
            sequences = b.gather(sequences, places, 0)
            caches = [b.gather(v, places, axis) for v in caches]
        column = b.reshape(chosen, (sequences.shape[0], 1))
        return go, [column, b.concat([sequences, column], 1), *state, *caches], results

    def run(i: Builder, number: Value, go: Value, carried: list[Value]) -> tuple[Value, list[Value], list[Value]]:
        last, longer, *rest = carried
        before, held = rest[: len(state)], rest[len(state) :]
        logits, after = decoder(i, last, longer, held)
        return extended(i, logits, longer, after, before, False)

    start = sequences.shape[1]
    go, carried, first = extended(b, logits, sequences, caches, state, True)
    trip = b.size_as(most - start - 1, dtypes.int64)
    ends, rest = iterate(b, trip, go, carried, run)
    results = [b.concat([b.reshape(f, (1, *f.shape)), r], 0) for f, r in zip(first, rest, strict=True)]
    return Generated(ends[1], ends[2 : 2 + len(state)], results)


# ---------------------------------------------------------------- decoders


def gpt(
    b: Builder, ids: Value, mask: Value | None, fill: int, beams: int, decoder: Graph, first: Graph | None
) -> tuple[Value, Value, list[Value], Decoder]:
    """A decoder of input_ids, position_ids, attention_mask and one cache [2, rows, heads, length, size] a layer.

    Returns the logits of the prompt, the sequences, the caches, and how to go on.
    """
    layers = len(decoder.outputs) - 1
    if len(decoder.inputs) != 3 + layers or layers < 1:
        raise UnsupportedError(
            f"a decoder of {len(decoder.inputs)} inputs and {len(decoder.outputs)} outputs is not supported: it takes "
            "input_ids, position_ids, attention_mask and the caches that it gives; those with a buffer for past and "
            "present are for GPUs"
        )
    ids = repeated(b, b.cast(ids, dtypes.int32), beams)
    seen = b.not_(b.eq(ids, fill)) if mask is None else repeated(b, b.not_(b.eq(mask, 0)), beams)
    ones = b.cast(seen, dtypes.int32)
    place = b.one("cumsum", ones, axis=1, exclusive=True, reverse=False)
    positions = b.where(seen, place, b.scalar(0, dtypes.int32))
    rows, length = ids.shape
    count = b.reduce("sum", ones, [1], True)
    cache = [_no_cache(b, decoder, v.name, rows) for v in decoder.inputs[3:]]
    logits, *caches = lower(b, first or decoder, b, [ids, positions, ones, *cache])

    def step(i: Builder, words: Value, sequences: Value, caches: list[Value]) -> tuple[Value, list[Value]]:
        past = caches[0].shape[3]
        held = [i.slice(v, 3, 0, past) for v in caches]  # which have it, but each a size of its own
        since = past - length
        more = i.full((rows, since + 1), i.scalar(1, dtypes.int32), dtypes.int32)
        at = i.add(count, i.size_as(since, dtypes.int32))
        logits, *after = lower(b, decoder, i, [words, at, i.concat([ones, more], 1), *held])
        return logits, after

    return logits, ids, caches, step


def encoder_decoder(
    b: Builder, ids: Value, mask: Value | None, fill: int, start: int, beams: int, encoder: Graph, decoder: Graph
) -> tuple[Value, Value, list[Value], Decoder]:
    """A decoder behind an encoder, as T5 has them. It reads words, what it names of the encoder's inputs and hidden
    states, the caches [rows, heads, length, size] of its own attention, two a layer, and those of the encoder.

    The encoder takes ids and mask and gives its caches, or takes the first words as well, and gives logits, hidden
    states, and both kinds of caches. Returns as :func:`gpt`.
    """
    ids = b.cast(ids, dtypes.int32)
    if mask is None:  # padding is what stands to the left
        there = b.cast(b.not_(b.eq(ids, fill)), dtypes.int32)
        mask = b.lt(0, b.one("cumsum", there, axis=1, exclusive=False, reverse=False))
    mask = b.cast(mask, dtypes.int32)
    words = _first_words(b, start, ids.shape[0])
    known = {"encoder_input_ids": ids, "encoder_attention_mask": mask}
    return _behind(b, [ids, mask, words][: len(encoder.inputs)], words, known, beams, encoder, decoder)


def whisper(
    b: Builder, features: Value, words: Value | None, start: int, beams: int, encoder: Graph, decoder: Graph
) -> tuple[Value, Value, list[Value], Decoder]:
    """The same for sound: the encoder takes features [batch, size, length] and the first words [batch, n]."""
    words = _first_words(b, start, features.shape[0]) if words is None else b.cast(words, dtypes.int32)
    return _behind(b, [features, words], words, {}, beams, encoder, decoder)


def _first_words(b: Builder, start: int, rows: Dim) -> Value:
    if start < 0:
        raise ModelError(f"the decoder_start_token_id is {start}: it must not be negative")
    return b.full((rows, 1), b.scalar(start, dtypes.int32), dtypes.int32)


def _behind(
    b: Builder, inputs: list[Value], words: Value, known: dict[str, Value], beams: int, encoder: Graph, decoder: Graph
) -> tuple[Value, Value, list[Value], Decoder]:
    """An encoder that is given `inputs`, and a decoder that reads of it what it names."""
    own = len(decoder.outputs) - 1
    at = len(decoder.inputs) - 2 * own
    memory = [v.name for v in decoder.inputs[1:at]]
    makes_words = len(encoder.outputs) == 2 + 2 * own
    readable = {*known, HIDDEN_STATES} if makes_words else {*known}
    if own < 2 or at < 1 or len(encoder.inputs) != len(inputs) or len(encoder.outputs) not in (own, 2 + 2 * own):
        raise UnsupportedError(
            f"an encoder of {len(encoder.inputs)} inputs and {len(encoder.outputs)} outputs, and a decoder of "
            f"{len(decoder.inputs)} and {len(decoder.outputs)}, do not fit"
        )
    unknown = [name for name in memory if name not in readable]
    if unknown:
        raise UnsupportedError(
            f"a decoder that reads {unknown[0]!r} of its encoder; known are {', '.join(sorted(readable))}"
        )
    given = lower(b, encoder, b, inputs)
    words, *given = [repeated(b, v, beams) for v in (words, *given)]
    read = {name: repeated(b, v, beams) for name, v in known.items() if name in memory}
    if makes_words:
        read[HIDDEN_STATES] = given[1]
    states = [read[name] for name in memory]
    whole = (decoder.metadata.get("input_types", {}).get(decoder.inputs[0].name) or ["", None])[1]
    reads_all = whole is not None and len(whole) == 2 and whole[1] != 1

    def step(i: Builder, last: Value, sequences: Value, caches: list[Value]) -> tuple[Value, list[Value]]:
        past = caches[0].shape[2]
        held = [i.slice(v, 2, 0, past) for v in caches]
        logits, *after = lower(b, decoder, i, [sequences if reads_all else last, *states, *held, *cross])
        return logits, after

    if makes_words:
        logits, caches, cross = given[0], given[2 : 2 + own], given[2 + own :]
    else:
        cross = given
        empty = [_no_cache(b, decoder, v.name, words.shape[0]) for v in decoder.inputs[at : at + own]]
        logits, *caches = lower(b, decoder, b, [words, *states, *empty, *cross])
    return logits, words, caches, step


def _no_cache(b: Builder, graph: Graph, name: str, rows: Dim) -> Value:
    """A cache of no words, as the decoder declares it: [2, rows, heads, length, size], or each of the two alone."""
    kind, shape = graph.metadata.get("input_types", {}).get(name) or ("", None)
    if kind not in dtypes.BY_NAME or shape is None or len(shape) not in (4, 5):
        raise ModelError(f"the decoder's cache {name!r} is {kind} {shape}, not [..., batch, heads, length, size]")
    lead, heads, size = shape[:-4], shape[-3], shape[-1]
    if not isinstance(heads, int) or not isinstance(size, int) or lead not in ([], [2]):
        raise ModelError(f"the decoder's cache {name!r} is {kind} {shape}: heads and their size must be numbers")
    dtype = dtypes.BY_NAME[kind]
    return b.full((*lead, rows, heads, 0, size), b.scalar(0, dtype), dtype)


# ---------------------------------------------------------------- the operators


def _beam_count(b: Builder, beams: Value, returned: Value) -> tuple[int, int]:
    (n,), (count,) = b.static_ints(beams, "the number of beams"), b.static_ints(returned, "num_return_sequences")
    if not 1 <= count <= n <= MOST_BEAMS:
        raise ModelError(f"{count} sequences of {n} beams: 1 to {MOST_BEAMS} beams, and at most as many sequences")
    return n, count


def _length(b: Builder, most: Value, start: Dim) -> Dim:
    """The max_length, which has to leave room behind the first words."""
    known = constant_of(most)
    if known is None or not isinstance(start, int):
        at = b.size_as(start, dtypes.int64)
        (most,) = on_host(b, "ms_greatest_length", [b.cast(scalar(b, most), dtypes.int64), at], [at.t])
    elif not start < known.item() <= MOST_WORDS:
        raise ModelError(f"the max_length is {known.item()}; it is to be more than {start}, {MOST_WORDS} at most")
    return b.extents(b.reshape(b.cast(most, dtypes.int64), (1,)), "the max_length")[0]


@op("BeamSearch", 1, domain=MS)
def beam_search(
    b: Builder, ids: Value, max_length: Value, min_length: Value | None, num_beams: Value,
    num_return_sequences: Value, length_penalty: Value | None = None, repetition_penalty: Value | None = None,
    vocab_mask: Value | None = None, prefix_vocab_mask: Value | None = None, attention_mask: Value | None = None,
    decoder_input_ids: Value | None = None, logits_processor: Value | None = None, *, decoder: Graph,
    init_decoder: Graph | None = None, encoder: Graph | None = None, decoder_start_token_id: int = -1,
    early_stopping: Flag = 0, eos_token_id: int, model_type: int = GPT, no_repeat_ngram_size: int = 0,
    pad_token_id: int, vocab_size: int = -1, n_outputs: int,
) -> list[Value | None]:  # fmt: skip
    """The best sequences [batch, returned, max_length], their marks, and the scores of all words at each step."""
    if model_type not in (GPT, ENCODER_DECODER, WHISPER) or (encoder is None) != (model_type == GPT):
        raise UnsupportedError(
            f"BeamSearch of the model_type {model_type}, {'with' if encoder else 'without'} an encoder"
        )
    if decoder_input_ids is not None and model_type != WHISPER:
        raise UnsupportedError(f"BeamSearch of the model_type {model_type} with decoder_input_ids is not supported")
    if logits_processor is not None and any(b.static_ints(logits_processor, "the logits_processor")):
        raise UnsupportedError("BeamSearch with a logits_processor of its own is not supported")
    beams, count = _beam_count(b, num_beams, num_return_sequences)
    rules = Rules(
        eos_token_id, pad_token_id, max(vocab_size, 0), no_repeat_ngram_size, min_length, repetition_penalty,
        vocab_mask, prefix_vocab_mask, beams=beams,
    )  # fmt: skip
    penalty = b.scalar(1.0, dtypes.float32) if length_penalty is None else scalar(b, length_penalty)
    strategy = Beams(rules, bool(early_stopping), b.cast(penalty, dtypes.float32), n_outputs > 2)
    start, pad = decoder_start_token_id, pad_token_id
    if encoder is None:
        run = gpt(b, ids, attention_mask, pad, beams, decoder, init_decoder)
    elif model_type == WHISPER:
        run = whisper(b, ids, decoder_input_ids, start, beams, encoder, decoder)
    else:
        run = encoder_decoder(b, ids, attention_mask, pad, start, beams, encoder, decoder)
    sequences = run[1]
    most = _length(b, max_length, sequences.shape[1])
    outputs = _best(b, strategy, run, 0 if encoder else 1, ids.shape[0], most, pad, count)
    if n_outputs > 2:
        scores = outputs.pop()
        outputs.append(_filled(b, scores, 0, most - sequences.shape[1], b.scalar(0.0, scores.dtype)))
    return [*outputs[:n_outputs]]


def _best(
    b: Builder, strategy: Beams, run: tuple[Value, Value, list[Value], Decoder], axis: int, batch: Dim, most: Dim,
    fill: int, count: int,
) -> list[Value]:  # fmt: skip
    """The best `count` sequences of each input, their marks, and what the strategy has collected."""
    logits, sequences, caches, step = run
    found = generate(b, strategy, logits, sequences, caches, axis, batch, most, step)
    types = [TensorType(dtypes.int32, (batch, count, most)), TensorType(dtypes.float32, (batch, count))]
    sums, *kept = found.state
    given = [sums, found.sequences, *kept, strategy.penalty]
    return [*on_host(b, "ms_beam_result", given, types, fill=fill, count=count), *found.results]


@op("WhisperBeamSearch", 1, domain=MS)
def whisper_beam_search(
    b: Builder, features: Value, max_length: Value, min_length: Value | None, num_beams: Value,
    num_return_sequences: Value, length_penalty: Value | None = None, repetition_penalty: Value | None = None,
    vocab_mask: Value | None = None, prefix_vocab_mask: Value | None = None, attention_mask: Value | None = None,
    decoder_input_ids: Value | None = None, logits_processor: Value | None = None,
    cross_qk_layer_head: Value | None = None, extra_decoding_ids: Value | None = None,
    temperature: Value | None = None, *, decoder: Graph, encoder: Graph, init_decoder: Graph | None = None,
    decoder_output_cross_qk: Flag = 0, decoder_start_token_id: int = -1, early_stopping: Flag = 0, eos_token_id: int,
    model_type: int = WHISPER, no_repeat_ngram_size: int = 0, pad_token_id: int, vocab_size: int = -1,
    translate_token_id: int = -1, transcribe_token_id: int = -1, start_of_lm_token_id: int = -1,
    no_speech_token_id: int = -1, no_timestamps_token_id: int = -1, beginning_timestamp_token_id: int = -1,
    n_outputs: int,
) -> list[Value | None]:  # fmt: skip
    """BeamSearch of Whisper. The tokens by their roles only matter to what is not supported: rules for time stamps,
    the attention to the sound, and how probable it is that nobody speaks.
    """
    known = None if temperature is None else constant_of(temperature)
    if decoder_output_cross_qk or extra_decoding_ids is not None or n_outputs > 3:
        raise UnsupportedError("WhisperBeamSearch with cross_qk, extra_decoding_ids or no_speech_probs")
    if temperature is not None and (known is None or known.ravel().tolist() != [1.0]):
        raise UnsupportedError("WhisperBeamSearch with a temperature other than 1")
    if model_type != WHISPER:
        raise ModelError(f"WhisperBeamSearch has the model_type {model_type}; it must be {WHISPER}")
    return beam_search(
        b, features, max_length, min_length, num_beams, num_return_sequences, length_penalty, repetition_penalty,
        vocab_mask, prefix_vocab_mask, attention_mask, decoder_input_ids, logits_processor, decoder=decoder,
        init_decoder=init_decoder, encoder=encoder, decoder_start_token_id=decoder_start_token_id,
        early_stopping=early_stopping, eos_token_id=eos_token_id, model_type=model_type,
        no_repeat_ngram_size=no_repeat_ngram_size, pad_token_id=pad_token_id, vocab_size=vocab_size,
        n_outputs=n_outputs,
    )  # fmt: skip


def _filled(b: Builder, x: Value, axis: int, size: Dim, value: Value) -> Value:
    """Filled up to a size, at the end of an axis."""
    shape = [*x.shape]
    shape[axis] = size - x.shape[axis]
    return b.slice(b.concat([x, b.full(shape, value, x.dtype)], axis), axis, 0, size)


@op("GreedySearch", 1, domain=MS)
def greedy_search(
    b: Builder, ids: Value, max_length: Value, min_length: Value | None = None,
    repetition_penalty: Value | None = None, vocab_mask: Value | None = None, prefix_vocab_mask: Value | None = None,
    attention_mask: Value | None = None, *, decoder: Graph, init_decoder: Graph | None = None,
    encoder: Graph | None = None, decoder_start_token_id: int = -1, eos_token_id: int, model_type: int = GPT,
    no_repeat_ngram_size: int = 0, pad_token_id: int, vocab_size: int = -1,
) -> Value:  # fmt: skip
    """Sequences [batch, max_length] of the words of the greatest scores."""
    rules = Rules(
        eos_token_id, pad_token_id, max(vocab_size, 0), no_repeat_ngram_size, min_length, repetition_penalty,
        vocab_mask, prefix_vocab_mask,
    )  # fmt: skip
    if model_type != GPT or encoder is not None:
        raise UnsupportedError("GreedySearch of a decoder behind an encoder is not supported; onnxruntime has none")
    return _single(b, Greedy(rules), ids, max_length, attention_mask, decoder, init_decoder)[0]


@op("Sampling", 1, domain=MS)
def sampling(
    b: Builder, ids: Value, max_length: Value, min_length: Value | None = None,
    repetition_penalty: Value | None = None, vocab_mask: Value | None = None, prefix_vocab_mask: Value | None = None,
    attention_mask: Value | None = None, presence_mask: Value | None = None, seed: Value | None = None, *,
    custom: Flag = 0, decoder: Graph, init_decoder: Graph | None = None, encoder: Graph | None = None,
    decoder_start_token_id: int = -1, eos_token_id: int, filter_value: float = -1e20, min_tokens_to_keep: int = 0,
    model_type: int = GPT, no_repeat_ngram_size: int = 0, pad_token_id: int, presence_penalty: float = 0.0,
    temperature: float = 1.0, top_p: float = 0.0, vocab_size: int = -1,
) -> list[Value]:  # fmt: skip
    """Sequences [batch, max_length] of words that are drawn, and the scores of the last ones."""
    if model_type != GPT or encoder is not None:
        raise UnsupportedError("Sampling of a decoder behind an encoder is not supported; onnxruntime has none")
    if seed is None:
        raise UnsupportedError("Sampling without a seed is not supported: give it one, as an input of the model")
    presence = None
    if presence_mask is not None and presence_penalty != 0.0:
        presence = b.mul(b.cast(presence_mask, dtypes.float32), presence_penalty)
    rules = Rules(
        eos_token_id, pad_token_id, max(vocab_size, 0), no_repeat_ngram_size, min_length, repetition_penalty,
        vocab_mask, prefix_vocab_mask, temperature, presence,
    )  # fmt: skip
    strategy = Drawn(rules, seed, top_p, min_tokens_to_keep, filter_value, bool(custom))
    sequences, state = _single(b, strategy, ids, max_length, attention_mask, decoder, init_decoder)
    return [sequences, state[-1]]


def _single(
    b: Builder, strategy: Greedy, ids: Value, max_length: Value, mask: Value | None, decoder: Graph,
    first: Graph | None,
) -> tuple[Value, State]:  # fmt: skip
    """One sequence for each input, filled up where all have ended (onnxruntime leaves that open); the last state."""
    most = _length(b, max_length, ids.shape[1])
    logits, sequences, caches, step = gpt(b, ids, mask, strategy.rules.fill, 1, decoder, first)
    found = generate(b, strategy, logits, sequences, caches, 1, ids.shape[0], most, step)
    return _filled(b, found.sequences, 1, most, b.scalar(strategy.rules.fill, dtypes.int32)), found.state
