"""The tokens that an adapter has requested and found, logged every so many requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

_log = logging.getLogger("kvelastic.flexkv")


@dataclass
class FlexKVStats:
    """Counts since the last log line. Not thread-safe. Names are FlexKV's."""

    num_log_interval_requests: int = 200
    """Gets after which a line is logged and the counts are reset."""
    num_get_requests: int = 0
    num_get_query_tokens: int = 0
    num_gpu_matched_tokens: int = 0
    """Found by the engine, on its device."""
    num_flexkv_matched_tokens: int = 0
    num_put_requests: int = 0
    num_put_query_tokens: int = 0
    num_put_unmatched_tokens: int = 0
    num_failed_requests: int = 0

    @property
    def total_num_requests(self) -> int:
        """Gets and puts."""
        return self.num_get_requests + self.num_put_requests

    @property
    def get_gpu_match_ratio(self) -> float:
        """The part of the requested tokens that the device had; 0 without requests."""
        return _ratio(self.num_gpu_matched_tokens, self.num_get_query_tokens)

    @property
    def get_flexkv_match_ratio(self) -> float:
        """The part of the requested tokens that the tiers had; 0 without requests."""
        return _ratio(self.num_flexkv_matched_tokens, self.num_get_query_tokens)

    @property
    def get_put_token_ratio(self) -> float:
        """Tokens found for each token put; 0 without puts."""
        return _ratio(self.num_flexkv_matched_tokens, self.num_put_unmatched_tokens)

    def record_get(
        self, num_prompt_tokens: int, num_gpu_matched_tokens: int, num_flexkv_matched_tokens: int
    ) -> None:
        """Count a get."""
        self.num_get_requests += 1
        self.num_get_query_tokens += num_prompt_tokens
        self.num_gpu_matched_tokens += num_gpu_matched_tokens
        self.num_flexkv_matched_tokens += num_flexkv_matched_tokens
        if self.num_get_requests >= self.num_log_interval_requests:
            self.log()
            self.clear()

    def record_put(self, num_all_tokens: int, num_unmatched_tokens: int) -> None:
        """Count a put."""
        self.num_put_requests += 1
        self.num_put_query_tokens += num_all_tokens
        self.num_put_unmatched_tokens += num_unmatched_tokens

    def record_failed(self, num_failed_requests: int) -> None:
        """Count requests whose copies failed."""
        self.num_failed_requests += num_failed_requests

    record_faild = record_failed
    """FlexKV's spelling."""

    def clear(self) -> None:
        """Reset the counts."""
        for one in fields(self)[1:]:
            setattr(self, one.name, 0)

    def log(self) -> None:
        """Log the counts as one line."""
        _log.info(
            "Last %d gets: %d tokens asked for, %.1f %% found on the device, %.1f %% in tiers;"
            " %d tokens put; %d requests failed.",
            self.num_get_requests,
            self.num_get_query_tokens,
            100 * self.get_gpu_match_ratio,
            100 * self.get_flexkv_match_ratio,
            self.num_put_unmatched_tokens,
            self.num_failed_requests,
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
