"""vLLM's KV connector `KvelasticTransfer`: prompts computed in one engine, decoded in another.

It is our OffloadingConnector (`connector_class`) with our spec (`tier_spec`), which also loads from
tiers. It adds what vLLM's proxies exchange, `kv_transfer_params`::

    prefill   do_remote_decode   the finished request's blocks are held; it returns their ticket
    decode    do_remote_prefill  the ticket's blocks count as stored in the tier `peer`

Imports vLLM. vLLM imports it by the name in the connector's configuration (`tier_connector`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from kvelastic.integration.vllm import in_tiers
from kvelastic.integration.vllm.connector_class import OffloadingConnector

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class KvelasticTransfer(OffloadingConnector):
    """Loads blocks from tiers and prefill engines, and holds blocks for decode engines."""

    def on_new_request(self, request: Any) -> None:
        """Note the request's ticket."""
        super().on_new_request(request)
        asked = request.kv_transfer_params or {}
        tiers = in_tiers.of_this_engine()
        if asked.get("do_remote_prefill") and tiers is not None:
            tiers.expect(request.request_id, asked, request.block_hashes)

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
            parameters = tiers.hold(request.request_id, block_ids[0])
        return delays, parameters
