"""What the variables say about tiers, in the words of the parts that go by it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvelastic.config import Config
from kvelastic.tier_list import TierSpec
from kvelastic.tiers.policy import Copies, Deadlines, Rules, WritePolicy


@dataclass(frozen=True)
class TierSettings:
    """All of it; see docs/configuration.md for each variable."""

    tiers: tuple[TierSpec, ...] = ()
    rules: Rules = field(default_factory=Rules)
    staging_bytes: int = 64 << 20
    daily_write_bytes: int | None = None

    @staticmethod
    def of(config: Config) -> TierSettings:
        """Those of a configuration, which has checked every value."""
        rules = Rules(
            policy=WritePolicy(config.tier_policy),
            copies=Copies(config.tier_copies),
            deadlines=Deadlines(config.tier_reclaim_s, config.tier_limit_s, config.tier_sleep_s),
            watermark=config.tier_watermark / 100,
            idle_after_s=math.inf if config.tier_idle_s is None else config.tier_idle_s,
            cache_idle_s=math.inf if config.cache_idle_s is None else config.cache_idle_s,
            write_bytes_per_s=config.tier_write_rate,
        )
        return TierSettings(config.tiers, rules, config.tier_staging, config.tier_daily_write)

    def staging_slots(self, record_bytes: int) -> int:
        """How many records staging has room for: four at least, or nothing overlaps."""
        return max(4, self.staging_bytes // record_bytes)
