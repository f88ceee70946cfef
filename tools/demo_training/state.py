"""The recompute path at training speed: documents packed in one sequence, fused attention, targets.

Knows how to answer a module's questions fast and differentiably; the formulas are the product's.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from deepinfer.model.norm import RMSNorm
from deepinfer.model.recompute import RecomputeState
from deepinfer.model.transformer import Transformer
from deepinfer.ops.candidate_blocks import candidate_blocks
from deepinfer.ops.index_scores import index_scores
from deepinfer.ops.topk_select import topk_select


def document_numbers(token_ids: Tensor, bos: int) -> Tensor:
    """[B, T] number of the document that each token belongs to; each begins with `bos`."""
    return (token_ids == bos).to(torch.int32).cumsum(-1)


class TrainingState(RecomputeState):
    """RecomputeState of packed documents: a token sees its own document only.

    Args:
        sparse: attend to the entries that the indexer selects; otherwise to all visible ones.
        sampled: [R] query positions at which the indexer is compared with attention.
        candidate_targets: compare the source of candidates also with the attention of the layers
            that choose among them.
    """

    def __init__(
        self, model: Transformer, token_ids: Tensor, token_map: Tensor, sparse: bool,
        sampled: Tensor, candidate_targets: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, token_ids, token_map)
        self.sparse = sparse
        self.candidate_targets = candidate_targets
        self.sampled = sampled
        self.documents = document_numbers(token_ids, model.config.bos_token_id)
        same = self.documents.unsqueeze(-1) == self.documents.unsqueeze(-2)
        self.window = self.window & same
        self._visible: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor] = {}
        self._index_rows: dict[int, Tensor] = {}
        self._targets: dict[int, Tensor] = {}

    def ngram_classes(self) -> Tensor:
        """[B, T, G]; tokens of another document count as padding, as before a sequence's start."""
        classes = super().ngram_classes()
        assert self.token_map is not None
        filler = self.token_map[self.config.engram_pad_token_id]
        depth = self.config.engram_max_ngram_size
        length = self.documents.shape[-1]
        earlier = pad(self.documents, (depth - 1, 0), value=-1)
        same = torch.stack(
            [earlier[:, depth - 1 - back : depth - 1 - back + length] == self.documents
             for back in range(depth)], -1,
        )  # fmt: skip
        return torch.where(same, classes, filler)

    def visible_entries(self, ratio: int) -> Tensor:
        """[B, T, n] entries of complete groups that lie in the query's own document altogether."""
        if ratio not in self._visible:
            count = self.documents.shape[-1] // ratio
            first = self.documents[:, ::ratio][:, :count]
            last = self.documents[:, ratio - 1 :: ratio]
            numbers = torch.arange(count, device=last.device)
            complete = numbers < ((self.positions + 1) // ratio).unsqueeze(-1)
            same = self.documents.unsqueeze(-1) == last.unsqueeze(-2)
            self._visible[ratio] = complete & same & (first == last).unsqueeze(-2)
        return self._visible[ratio]

    def select(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Publish the selection, and keep the scores of sampled rows for the index loss."""
        c = self.config
        ratio = c.compress_ratio(layer)
        keys = self.index_keys[c.kv_source(layer)]
        visible = self.visible_entries(ratio)
        rows = self.sampled
        scores = index_scores(queries[:, rows], weights[:, rows], keys)
        self._index_rows[layer] = scores.masked_fill(~visible[:, rows], -1e30)
        if self.sparse:
            with torch.no_grad():
                self.selected[layer] = self._select_sparse(layer, queries, weights, visible)
        else:
            self.selected[layer] = visible
        self._masks.pop(ratio, None)

    def _select_sparse(
        self, layer: int, queries: Tensor, weights: Tensor, visible: Tensor
    ) -> Tensor:
        c = self.config
        keys = self.index_keys[c.kv_source(layer)]
        scores = index_scores(queries, weights, keys).masked_fill(~visible, float("-inf"))
        if layer == c.candidate_source_layer_id:
            newest = (self.positions + 1) // c.compress_ratio(layer)
            self.candidates = candidate_blocks(
                scores, newest.expand(scores.shape[:-1]), c.candidate_block_size,
                c.candidate_topk_blocks,
            )  # fmt: skip
        elif c.restricts_to_candidates(layer) and self.candidates is not None:
            scores = scores.masked_fill(~self.candidates, float("-inf"))
        chosen = topk_select(scores, c.index_topk)
        mask = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool,
                           device=scores.device)  # fmt: skip
        mask.scatter_(-1, torch.where(chosen < 0, scores.shape[-1], chosen), True)
        return mask[..., :-1] & visible

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """The reference's attention as one fused call: the sink is a key of its own.

        Queries get a channel that holds sink / scale, the sink's key holds a one there and nothing
        else, and its value is zero; so its score is the sink, and it only enlarges the sum.
        """
        keys = self.window_keys(layer, kv, norm)
        ratio = self.config.compress_ratio(layer)
        if ratio:
            keys = torch.cat([keys, self.entries[self.config.kv_source(layer)]], dim=-2)
            if ratio not in self._masks:
                selected = self.selected[self.config.index_source(layer)]
                self._masks[ratio] = self._padded(torch.cat([self.window, selected], dim=-1))
        elif 0 not in self._masks:
            self._masks[0] = self._padded(self.window)
        mask = self._masks[ratio]
        if ratio:
            self._add_target(layer, queries, keys, sink)
        scale = self.config.head_dim**-0.5
        batch, length, heads, dim = queries.shape
        channel = (sink / scale).to(queries.dtype).view(1, 1, heads, 1)
        wide = torch.cat([queries, channel.expand(batch, length, heads, 1)], dim=-1)
        wide = pad(wide, (0, 7)).transpose(1, 2)
        total = mask.shape[-1]
        filled = pad(keys, (0, 8, 0, total - keys.shape[-2]))
        row = torch.arange(total, device=keys.device).unsqueeze(-1) == keys.shape[-2]
        column = torch.arange(dim + 8, device=keys.device) == dim
        k = (filled + (row & column).to(keys.dtype)).unsqueeze(1).expand(-1, heads, -1, -1)
        v = filled.unsqueeze(1).expand(-1, heads, -1, -1)
        out = scaled_dot_product_attention(wide, k, v, attn_mask=mask.unsqueeze(1), scale=scale)
        return out.transpose(1, 2)[..., :dim]

    @staticmethod
    def _padded(mask: Tensor) -> Tensor:
        """[B, T, S] with a column for the sink, padded to a multiple of 16 for the kernel."""
        batch, length, count = mask.shape
        total = -(-(count + 1) // 16) * 16
        sink = torch.ones(batch, length, 1, dtype=torch.bool, device=mask.device)
        return torch.nn.functional.pad(torch.cat([mask, sink], dim=-1), (0, total - count - 1))

    @torch.no_grad()
    def _add_target(self, layer: int, queries: Tensor, keys: Tensor, sink: Tensor) -> None:
        """Add this layer's attention over entries at the sampled rows to its index source's.

        With candidate targets it also counts for the source of the candidates that it comes from.
        """
        source = self.config.index_source(layer)
        rows = self.sampled
        visible = self.visible_entries(self.config.compress_ratio(layer))[:, rows]
        count = visible.shape[-1]
        mask = torch.cat([self.window[:, rows], visible], dim=-1).unsqueeze(2)
        q = queries[:, rows].float()
        scores = torch.einsum("brhd,bsd->brhs", q, keys.float()) * self.config.head_dim**-0.5
        scores = scores.masked_fill(~mask, -1e30)
        top = torch.maximum(scores.amax(-1), sink)
        weights = torch.exp(scores - top.unsqueeze(-1))
        total = weights.sum(-1) + torch.exp(sink - top)
        share = (weights[..., -count:] / total.unsqueeze(-1)).sum(2)
        self._targets[source] = self._targets.get(source, 0.0) + share
        if self.candidate_targets and self.config.restricts_to_candidates(source):
            coarse = self.config.candidate_source_layer_id
            assert coarse is not None
            self._targets[coarse] = self._targets[coarse] + share

    def index_loss(self) -> Tensor:
        """Cross-entropy of index scores against attention over entries, in nats, mean of sources.

        Rows count by the attention that goes to entries at all.
        """
        losses = []
        for source, scores in self._index_rows.items():
            target = self._targets[source]
            log_probabilities = torch.log_softmax(scores, dim=-1)
            mass = target.sum(-1)
            entropy = -torch.special.xlogy(target, target / mass.clamp_min(1e-9).unsqueeze(-1))
            kl = -(target * log_probabilities).sum(-1) - entropy.sum(-1)
            losses.append(kl.sum() / mass.sum().clamp_min(1e-6))
        return torch.stack(losses).mean()


def detach_indexers(model: Transformer) -> None:
    """Keep the index loss inside the indexers: their inputs pass no gradient back."""
    for layer in model.layers:
        indexer = layer.attn.indexer
        if indexer is None:
            continue
        indexer.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].detach(), inputs[1].detach(), inputs[2])
        )
        if hasattr(indexer, "wk"):
            plain = indexer.keys
            indexer.keys = lambda latents, plain=plain: plain(latents.detach())
