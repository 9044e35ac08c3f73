"""vLLM's KV connector `KvelasticTransfer`: prompts computed in one engine, decoded in another.

It is our OffloadingConnector (`connector_class`) with our spec (`tier_spec`), which also loads from
tiers. It adds what vLLM's proxies exchange, `kv_transfer_params`::

    prefill   do_remote_decode   the finished prompt's blocks are held; it returns their ticket
    decode    do_remote_prefill  the ticket's blocks count as stored in the tier `peer`

With several KV cache groups, a block's key has its group. Of a sliding window the last blocks are
held and expected, so both engines know them without naming them.

Imports vLLM. vLLM imports it by the name in the connector's configuration (`connector_settings`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from kvelastic.integration.vllm import in_tiers
from kvelastic.integration.vllm.connector_class import OffloadingConnector
from kvelastic.integration.vllm.in_tiers import NamedBlock

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class KvelasticTransfer(OffloadingConnector):
    """Loads blocks from tiers and prefill engines, and holds blocks for decode engines."""

    def on_new_request(self, request: Any) -> None:
        """Note the request's ticket."""
        super().on_new_request(request)
        asked = request.kv_transfer_params or {}
        tiers = in_tiers.of_this_engine()
        if asked.get("do_remote_prefill") and tiers is not None:
            tiers.expect(request.request_id, asked, self._needed(request))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Let the prefill engine release its blocks if this engine has them all."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        tiers = in_tiers.of_this_engine()
        if not num_external_tokens and tiers is not None:
            tiers.needs_no_more(request.request_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a prefill, and return its ticket. vLLM frees them as usual."""
        delays, parameters = super().request_finished_all_groups(request, block_ids)
        tiers = in_tiers.of_this_engine()
        if tiers is None:
            return delays, parameters
        tiers.needs_no_more(request.request_id)
        asked = request.kv_transfer_params or {}
        if asked.get("do_remote_decode") and request.status in _COMPLETE:
            parameters = tiers.hold(request.request_id, block_ids, self._needed(request))
        return delays, parameters

    def _needed(self, request: Any) -> list[NamedBlock]:
        """Return the blocks with which a prompt needs no prefill; both engines compute the same.

        These are the blocks that vLLM looks up if none is here: of a sliding window only the last.
        """
        state = self.connector_scheduler._req_status[request.request_id]
        state.update_offload_keys()
        groups = state.config.kv_group_configs
        tokens = request.num_prompt_tokens
        whole = min(tokens // group.tokens_per_chunk * group.tokens_per_chunk for group in groups)
        needed: list[NamedBlock] = []
        for group, of_group in zip(groups, state.group_states, strict=True):
            end = -(-whole // group.tokens_per_chunk)
            # The last token is computed in any case, and its window begins one token earlier.
            window = group.load_window_size_in_chunks(min(whole, tokens - 1))
            first = 0 if window is None else max(0, end - window)
            needed += (
                NamedBlock(group.group_idx, place, of_group.offload_keys[place])
                for place in range(first, end)
            )
        return needed
