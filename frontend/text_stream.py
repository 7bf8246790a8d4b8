"""The text of one request: its tokens detokenised and cut at the first stop string."""

from __future__ import annotations

from deepinfer.frontend.detokenizer import Detokenizer
from deepinfer.frontend.stop_strings import StopMatcher
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.wire.params import SamplingParams


class TextStream:
    """Turns the tokens of one output into text.

    A stop string counts when it is completed by the ``min_tokens``-th output token or a later one,
    wherever it began. One that an earlier token completes is text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        stops = params.stop_strings
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output) if stops else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text: the last token, or ``finish``, completed it."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_id: int, is_stop_token: bool = False) -> str:
        """Return the text that an output token brings; with ``stop`` set the request is over.

        ``is_stop_token``: it ended the request as EOS or as a stop token id. It counts, but its
        text is left out, unless ``include_stop_str_in_output``.
        """
        self._num_tokens += 1
        silent = is_stop_token and not self._include_stop
        text = "" if silent else self._detokenizer.push(token_id)
        return text if self._matcher is None else self._matcher.push(text, self._armed)[0]

    def finish(self) -> str:
        """Return the rest of the text, once no more tokens come; empty after a stop string.

        The rest may complete a stop string (its last bytes were waiting for a further token): then
        it is cut there and ``stop`` is set.
        """
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return rest
        passed, stop = self._matcher.push(rest, self._armed)
        return passed if stop is not None else passed + self._matcher.finish()

    @property
    def _armed(self) -> bool:
        return self._num_tokens >= self._min_tokens
