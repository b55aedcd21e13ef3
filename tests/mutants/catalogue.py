"""The mutants: which text of which symbol becomes what, where the bug was seen, what must notice.

Sources: "nano-vllm 219" is issue 219 of GeeeekExplorer/nano-vllm; mini-sglang, MinivLLM and vLLM
likewise; "forks" are private copies of nano-vllm; "found here" are bugs that these specs found.
"""

from __future__ import annotations

from dataclasses import dataclass

CORE = "nanovllm/v1/core"
SCHEDULER = f"{CORE}/sched/scheduler.py"
QUEUE = f"{CORE}/sched/request_queue.py"
UTILS = f"{CORE}/kv_cache_utils.py"
POOL = f"{CORE}/block_pool.py"
MANAGER = f"{CORE}/kv_cache_manager.py"
RADIX = f"{CORE}/radix_cache.py"
BATCH = "nanovllm/v1/worker/gpu_input_batch.py"
BLOCK_TABLE = "nanovllm/v1/worker/block_table.py"
RUNNER = "nanovllm/v1/worker/gpu_model_runner.py"
ASYNC_RUNNER = "nanovllm/v1/worker/async_gpu_model_runner.py"
SAMPLER = "nanovllm/v1/sample/sampler.py"
CPU_ATTN = "nanovllm/v1/attention/backends/cpu_attn.py"
INPUT_PROCESSOR = "nanovllm/v1/engine/input_processor.py"

FREE_QUEUE_SPEC = "tests/spec/test_free_queue.py::TestFreeQueue::runTest"
POOL_SPEC = "tests/spec/test_block_pool.py::TestPool::runTest"
MANAGER_SPEC = "tests/spec/test_kv_cache_manager.py::TestHashManager::runTest"
RADIX_SPEC = "tests/spec/test_radix_cache.py::TestRadix::runTest"
RADIX_MANAGER_SPEC = "tests/spec/test_radix_kv_cache_manager.py::TestRadixManager::runTest"
BATCH_SPEC = "tests/spec/test_input_batch.py::TestBatch::runTest"
SCHEDULER_SPEC = "tests/spec/test_scheduler.py::TestScheduling::runTest"
SAME_TOKENS = "tests/spec/test_same_tokens.py"
SAME_TOKENS_SPEC = (
    f"{SAME_TOKENS}::test_the_same_requests_give_the_same_tokens_however_they_are_served"
)
REPEATED_SPEC = f"{SAME_TOKENS}::test_a_repeated_request_repeats_its_tokens_out_of_the_cache"
ENGINE = "tests/spec/test_engine.py"
COMPANY_SPEC = f"{ENGINE}::test_a_request_gets_the_same_tokens_in_any_company"
EMBEDDED_SPEC = f"{ENGINE}::test_the_embedded_model_tells_the_same_story_in_any_company"
CONVERSATION_SPEC = f"{ENGINE}::test_a_conversation_continues_as_one_text"
END_TOKEN_SPEC = f"{ENGINE}::test_an_answer_ends_at_the_first_end_token"
SEEDS_SPEC = f"{ENGINE}::test_seeds_of_neighbours_are_their_own"
IDLE_SPEC = f"{ENGINE}::test_an_idle_engine_remembers_nobody"
FOUND = "tests/v1/core/test_found_by_specs.py"
RESET_SPEC = (
    "tests/v1/worker/test_gpu_model_runner.py"
    "::test_a_reset_leaves_the_model_s_inputs_where_they_are"
)
ASYNC = "tests/v1/worker/test_async_gpu_model_runner.py"
ASYNC_SPEC = f"{ASYNC}::test_async_and_sync_engines_give_the_same_tokens"


@dataclass(frozen=True)
class Mutant:
    name: str  # what is wrong
    source: str  # where such a bug was seen
    file: str
    symbol: str  # function, Class or Class.method that holds the text
    old: str  # occurs exactly once in the file
    new: str
    spec: str  # pytest node id of the test that must fail

    def description(self) -> str:
        return f"{self.name} {self.source} {self.file} {self.symbol} {self.spec}"


MUTANTS = [
    # ---- the free queue and the pool ----
    Mutant(
        "a removed block's successor still points to it",
        "forks: free list corrupted after a hit",
        UTILS,
        "FreeKVCacheBlockQueue.remove",
        "        after.prev_free_block = before\n",
        "",
        FREE_QUEUE_SPEC,
    ),
    Mutant(
        "a freed block is the next one taken",
        "LRU order reversed",
        UTILS,
        "FreeKVCacheBlockQueue.append_n",
        "        for block in blocks:\n            block.prev_free_block = last\n",
        "        for block in reversed(blocks):\n            block.prev_free_block = last\n",
        FREE_QUEUE_SPEC,
    ),
    Mutant(
        "a shared block is freed with its first holder",
        "mini-sglang 142",
        POOL,
        "BlockPool.free_blocks",
        "            if block.ref_cnt == 0:\n                freed.append(block)\n",
        "            freed.append(block)\n",
        POOL_SPEC,
    ),
    Mutant(
        "a hit on a held block adds no holder",
        "mini-sglang 52",
        POOL,
        "BlockPool.touch",
        "            block.ref_cnt += 1\n",
        "            block.ref_cnt = 1\n",
        POOL_SPEC,
    ),
    Mutant(
        "the last writer of a hash wins",
        "nano-vllm 219",
        POOL,
        "BlockHashToBlockMap.insert",
        "            self._cache[key] = {blocks.block_id: blocks, block.block_id: block}\n",
        "            self._cache[key] = block\n",
        POOL_SPEC,
    ),
    Mutant(
        "evicting one of two equal blocks forgets both",
        "nano-vllm 219, forks: removal by hash, not by block",
        POOL,
        "BlockPool._maybe_evict_cached_block",
        "        evicted = self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)\n"
        "        assert evicted is block\n",
        "        self.cached_block_hash_to_block._cache.pop(block.block_hash, None)\n",
        POOL_SPEC,
    ),
    Mutant(
        "a block taken for something else can still be found",
        "nano-vllm 208",
        POOL,
        "BlockPool.get_new_blocks",
        "            block.ref_cnt = 1\n            self._maybe_evict_cached_block(block)\n",
        "            block.ref_cnt = 1\n",
        MANAGER_SPEC,
    ),
    # ---- hashes and block tables ----
    Mutant(
        "the parent is left out of the hash",
        "forks: hits in the middle of another text",
        UTILS,
        "_hash_block",
        "(parent_block_hash or NONE_HASH) + tokens",
        "NONE_HASH + tokens",
        MANAGER_SPEC,
    ),
    Mutant(
        "the salt is left out of the hash",
        "tenants see each other's prefixes",
        UTILS,
        "get_request_block_hasher",
        "(request.cache_salt,) if salted else ()",
        "()",
        MANAGER_SPEC,
    ),
    Mutant(
        "a partly filled block is hashed as if full",
        "forks: partial chunk",
        UTILS,
        "get_request_block_hasher",
        "for i in range(0, len(tokens) - block_bytes + 1, block_bytes):",
        "for i in range(0, len(tokens), block_bytes):",
        MANAGER_SPEC,
    ),
    Mutant(
        "blocks are published for tokens not scheduled",
        "nano-vllm 208, 209",
        MANAGER,
        "KVCacheManager.allocate_slots",
        "request, min(num_computed_tokens + num_new_tokens, request.num_tokens)",
        "request, min(len(req_blocks) * self.block_size, request.num_tokens)",
        MANAGER_SPEC,
    ),
    Mutant(
        "a hit covers the last token",
        "nano-vllm 144, 199: zero-length query",
        MANAGER,
        "KVCacheManager.get_computed_blocks",
        "max_cache_hit_length = request.num_tokens - 1",
        "max_cache_hit_length = request.num_tokens",
        MANAGER_SPEC,
    ),
    Mutant(
        "a block counts as full one token late",
        "MinivLLM 75, 85: wrong modulo",
        MANAGER,
        "KVCacheManager.cache_blocks",
        "num_full_blocks = num_computed_tokens // self.block_size",
        "num_full_blocks = (num_computed_tokens - 1) // self.block_size",
        MANAGER_SPEC,
    ),
    Mutant(
        "a full block asks for its successor early",
        "MinivLLM 75, 85: needless preemption",
        MANAGER,
        "KVCacheManager.allocate_slots",
        "num_new_blocks = cdiv(num_tokens, self.block_size) - num_held",
        "num_new_blocks = num_tokens // self.block_size + 1 - num_held",
        MANAGER_SPEC,
    ),
    Mutant(
        "the last block of a hit gets no holder",
        "mini-sglang 52: ref count skipped on the last node",
        MANAGER,
        "KVCacheManager.allocate_slots",
        "self.block_pool.touch(computed)",
        "self.block_pool.touch(computed[:-1])",
        MANAGER_SPEC,
    ),
    Mutant(
        "a request's head is evicted before its tail",
        "LRU order reversed",
        MANAGER,
        "KVCacheManager.free",
        "self.block_pool.free_blocks(reversed(req_blocks))",
        "self.block_pool.free_blocks(req_blocks)",
        MANAGER_SPEC,
    ),
    Mutant(
        "blocks of a step that was taken back can be found",
        "found here; vLLM 0.23.0 with priorities",
        MANAGER,
        "KVCacheManager.free",
        "self.block_pool.evict_blocks(req_blocks[num_computed_blocks:num_cached_blocks])",
        "del num_computed_blocks, num_cached_blocks",
        f"{FOUND}::test_blocks_of_a_step_that_its_request_loses_again_are_not_found",
    ),
    # ---- the radix tree and its manager ----
    Mutant(
        "a lock skips the node itself",
        "mini-sglang 52",
        RADIX,
        "RadixCache.inc_lock_ref",
        'what a request stands on cannot be evicted."""\n',
        'what a request stands on cannot be evicted."""\n        node = node.parent or node\n',
        RADIX_SPEC,
    ),
    Mutant(
        "a locked leaf is a candidate for eviction",
        "mini-sglang 52",
        RADIX,
        "RadixCache._update_leaf_status",
        "if node.lock_ref == 0 and not node.children:",
        "if not node.children:",
        RADIX_SPEC,
    ),
    Mutant(
        "the most recent leaf is evicted first",
        "LRU order reversed",
        RADIX,
        "TreeNode.__lt__",
        "self.last_access_time < other.last_access_time",
        "self.last_access_time > other.last_access_time",
        RADIX_SPEC,
    ),
    Mutant(
        "a lookup does not count as use",
        "LRU turned into FIFO",
        RADIX,
        "RadixCache.match_prefix",
        "        access_time = self._clock()\n        node.last_access_time = access_time\n"
        "        while len(key):\n            child = node.children.get(self._child_key(key))\n"
        "            if child is None:\n                break\n"
        "            child.last_access_time = access_time\n"
        "            prefix_len = self._key_match(child.key, key)\n"
        "            node = self._split_node(child, prefix_len) if prefix_len < len(child.key)"
        " else child\n            slots.extend(node.value)\n",
        "        while len(key):\n            child = node.children.get(self._child_key(key))\n"
        "            if child is None:\n                break\n"
        "            prefix_len = self._key_match(child.key, key)\n"
        "            node = self._split_node(child, prefix_len) if prefix_len < len(child.key)"
        " else child\n            slots.extend(node.value)\n",
        RADIX_SPEC,
    ),
    Mutant(
        "a split loses the lock",
        "mini-sglang 52",
        RADIX,
        "RadixCache._split_node",
        "self._clock(), child.lock_ref\n",
        "self._clock()\n",
        RADIX_SPEC,
    ),
    Mutant(
        "a split leaves all slots in the lower part",
        "forks: slots and keys out of step",
        RADIX,
        "RadixCache._split_node",
        "        child.value = child.value[split_len:]\n",
        "",
        RADIX_SPEC,
    ),
    Mutant(
        "the name space is left out of the tree's keys",
        "tenants see each other's prefixes",
        RADIX,
        "RadixCache._child_key",
        "return key.extra_key, tuple(",
        "return None, tuple(",
        RADIX_SPEC,
    ),
    Mutant(
        "a duplicate page is freed while its request still maps it",
        "mini-sglang 142",
        RADIX,
        "RadixKVCacheManager._publish",
        "            state.is_private = True\n",
        "            state.is_private = True\n"
        "            first = state.num_cached_tokens // self.block_size\n"
        "            found = state.blocks[first : num_found // self.block_size]\n"
        "            self.block_pool.free_blocks(found)\n",
        RADIX_MANAGER_SPEC,
    ),
    Mutant(
        "pages are published before the step that computes them",
        "nano-vllm 208, 209",
        RADIX,
        "RadixKVCacheManager.allocate_slots",
        "        return KVCacheBlocks(new_blocks)\n",
        "        self._publish(state, min(num_tokens, request.num_tokens))\n"
        "        return KVCacheBlocks(new_blocks)\n",
        RADIX_MANAGER_SPEC,
    ),
    Mutant(
        "a hit is not locked before room is made for the rest",
        "mini-sglang 52",
        RADIX,
        "RadixKVCacheManager.allocate_slots",
        "            self.radix_cache.inc_lock_ref(state.last_node)\n",
        "",
        RADIX_MANAGER_SPEC,
    ),
    Mutant(
        "an ended request keeps its lock",
        "forks: cache fills up with what nobody uses",
        RADIX,
        "RadixKVCacheManager.free",
        "        self.radix_cache.dec_lock_ref(state.last_node)\n        # The tree",
        "        # The tree",
        RADIX_MANAGER_SPEC,
    ),
    Mutant(
        "a request locks another's copy of its own pages",
        "found here: livelock in a tight pool",
        RADIX,
        "RadixKVCacheManager._publish",
        "        if num_found > state.num_cached_tokens:\n",
        "        if num_found > self.max_model_len:\n",
        "tests/test_found_by_attack.py"
        "::test_a_request_that_fits_finds_room_beside_a_cached_copy_of_itself",
    ),
    # ---- the scheduler ----
    Mutant(
        "one more runs than max_num_seqs",
        "nano-vllm 271",
        SCHEDULER,
        "Scheduler.__init__",
        "self.max_num_running_reqs = scheduler_config.max_num_seqs",
        "self.max_num_running_reqs = scheduler_config.max_num_seqs + 1",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "the budget counts requests, not tokens",
        "forks: batch larger than its buffers",
        SCHEDULER,
        "_StepPlan.add",
        "self.token_budget -= num_new_tokens",
        "self.token_budget -= 1",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "the preempted go to the end of the queue",
        "nano-vllm 271: starvation",
        QUEUE,
        "FCFSRequestQueue.prepend_request",
        "self._queue.appendleft(request)",
        "self._queue.append(request)",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "the request of highest priority is preempted",
        "priority order turned round",
        SCHEDULER,
        "Scheduler._pick_victim",
        "victim = max(",
        "victim = min(",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "a preempted request without output vanishes",
        "MinivLLM 51",
        SCHEDULER,
        "Scheduler._preempt_request",
        "        self.waiting.prepend_request(request)\n",
        "        if request.output_token_ids:\n            self.waiting.prepend_request(request)\n",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "tokens are counted before the hit is taken",
        "nano-vllm 207, 211, 233",
        SCHEDULER,
        "Scheduler._schedule_waiting",
        "num_new_tokens = request.num_tokens - num_computed_tokens",
        "num_new_tokens = request.num_tokens",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "a resumed request loses its outputs",
        "nano-vllm 217",
        SCHEDULER,
        "Scheduler._make_cached_request_data",
        "data.all_token_ids[req_id] = request.all_token_ids.copy()",
        "data.all_token_ids[req_id] = request.prompt_token_ids.copy()",
        SAME_TOKENS_SPEC,
    ),
    Mutant(
        "blocks of a request that ended in its prompt leak",
        "forks: the cache shrinks with every abort",
        SCHEDULER,
        "Scheduler._free_request",
        "        self.kv_cache_manager.free(request)\n        self.finished_req_ids",
        "        if request.output_token_ids:\n"
        "            self.kv_cache_manager.free(request)\n        self.finished_req_ids",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "the runner is not told who has ended",
        "forks: rows of the dead fill the batch",
        SCHEDULER,
        "Scheduler._update_after_schedule",
        "            request.num_computed_tokens += num_scheduled\n",
        "            request.num_computed_tokens += num_scheduled\n"
        "            scheduler_output.finished_req_ids.clear()\n",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "a hit is never taken from the cached prefix but counted",
        "nano-vllm 207",
        SCHEDULER,
        "Scheduler._schedule_waiting",
        "                new_computed_blocks=new_computed_blocks,\n",
        "                new_computed_blocks=None,\n",
        REPEATED_SPEC,
    ),
    Mutant(
        "stop tokens other than the tokenizer's EOS are ignored",
        "vLLM 2947, 4180",
        f"{CORE}/sched/utils.py",
        "check_stop",
        "if last_token_id in (sampling_params.stop_token_ids or ()):",
        "if False:",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "min_tokens goes before the model's length",
        "found here; vLLM 0.23.0",
        f"{CORE}/sched/utils.py",
        "check_stop",
        "        if request.num_tokens < max_model_len:\n            return False\n",
        "        return False\n",
        f"{FOUND}::test_a_request_without_room_for_min_tokens_ends_at_the_models_length",
    ),
    Mutant(
        "a chunk inside the prompt counts as having sampled",
        "forks: chunked prefill adds a token",
        f"{CORE}/sched/async_scheduler.py",
        "AsyncScheduler._update_after_schedule",
        "if not request.is_prefill_chunk:",
        "if request.num_computed_tokens:",
        SCHEDULER_SPEC,
    ),
    Mutant(
        "async scheduling plans a step past max_tokens",
        "vLLM: wasted last step with async scheduling",
        SCHEDULER,
        "Scheduler._num_new_tokens",
        "            >= request.num_prompt_tokens + request.max_tokens\n",
        "            > request.num_prompt_tokens + request.max_tokens\n",
        SCHEDULER_SPEC,
    ),
    # ---- the batch ----
    Mutant(
        "the last slot of a block is in the next block",
        "slot mapping off by one at a block's end",
        BLOCK_TABLE,
        "BlockTable.compute_slot_mapping",
        "block_indices, block_offsets = np.divmod(positions, self.block_size)",
        "block_indices, block_offsets = np.divmod(positions, self.block_size)\n"
        "        last = np.maximum(self.num_blocks_per_row[req_indices] - 1, 0)\n"
        "        block_indices = np.minimum((positions + 1) // self.block_size, last)",
        BATCH_SPEC,
    ),
    Mutant(
        "a moved row keeps the hole's block table",
        "stale block table after condense",
        BATCH,
        "InputBatch._move_row",
        "        self.block_table.move_row(src, tgt)\n",
        "",
        BATCH_SPEC,
    ),
    Mutant(
        "a moved row samples with the hole's seed",
        "seed of another request",
        BATCH,
        "InputBatch.__init__",
        "            self.repetition_penalties.np,\n            self.seeds.np,\n",
        "            self.repetition_penalties.np,\n",
        BATCH_SPEC,
    ),
    Mutant(
        "a freed row goes on forbidding tokens",
        "forks: the next request in the row inherits its limits",
        BATCH,
        "InputBatch.remove_request",
        "            self.allowed_token_ids_mask.np[req_index] = False\n",
        "",
        BATCH_SPEC,
    ),
    # ---- the runner, attention, the sampler, the front end ----
    Mutant(
        "rotary positions restart at a cached prefix",
        "MinivLLM 88, 98",
        RUNNER,
        "GPUModelRunner._prepare_inputs",
        "        self.positions.copy_to_gpu(num_tokens_padded)\n",
        "        positions -= batch.num_computed_tokens_cpu[:num_reqs][req_indices]\n"
        "        self.positions.copy_to_gpu(num_tokens_padded)\n",
        COMPANY_SPEC,
    ),
    Mutant(
        "attention ignores the keys and values of a cached prefix",
        "MinivLLM 98",
        CPU_ATTN,
        "CPUAttentionMetadataBuilder._build_prefill",
        "if context_len == 0:",
        "if context_len >= 0:",
        CONVERSATION_SPEC,
    ),
    Mutant(
        "sampled rows are mixed up between requests",
        "forks: answers swapped",
        RUNNER,
        "GPUModelRunner._prepare_inputs",
        "np.subtract(query_start_loc[1:], 1, out=self.logits_indices.np[:num_reqs])",
        "np.subtract(query_start_loc[:0:-1], 1, out=self.logits_indices.np[:num_reqs])",
        COMPANY_SPEC,
    ),
    Mutant(
        "a token sampled inside the prompt is kept",
        "forks: chunked prefill adds a token",
        RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        "sampled_token_ids[row].clear()",
        "pass",
        COMPANY_SPEC,
    ),
    Mutant(
        "keys and values go to the slots of the tokens before them",
        "slot mapping off by one",
        BLOCK_TABLE,
        "BlockTable.compute_slot_mapping",
        "        slots += block_offsets\n",
        "        slots += np.maximum(block_offsets - 1, 0)\n",
        EMBEDDED_SPEC,
    ),
    Mutant(
        "a resumed request keeps the blocks it had",
        "mini-sglang 142: reads another's cache",
        RUNNER,
        "GPUModelRunner._update_cached_requests",
        "request.block_ids = list(new_block_ids or [])",
        "pass",
        COMPANY_SPEC,
    ),
    Mutant(
        "a greedy row in a mixed batch is drawn at random",
        "nano-vllm 249",
        SAMPLER,
        "Sampler.sample",
        "return torch.where(temperature < SAMPLING_EPS, greedy_sampled, random_sampled)",
        "return random_sampled",
        COMPANY_SPEC,
    ),
    Mutant(
        "all rows are drawn with the first row's seed",
        "seed shared between rows",
        SAMPLER,
        "Sampler.noise_keys",
        "torch.where(unseeded, fresh, seeds)",
        "torch.where(unseeded, fresh, seeds[:1])",
        SEEDS_SPEC,
    ),
    Mutant(
        "only the tokenizer's end token ends an answer",
        "vLLM 2947, 4180",
        INPUT_PROCESSOR,
        "InputProcessor._process_params",
        "            self.generation_config_fields,\n",
        "            {},\n",
        END_TOKEN_SPEC,
    ),
    Mutant(
        "the runner keeps what it knew of those who ended",
        "forks: memory grows with every request",
        RUNNER,
        "GPUModelRunner._remove_requests",
        "            self.requests.pop(req_id, None)\n",
        "",
        IDLE_SPEC,
    ),
    # ---- one step ahead of the samples ----
    Mutant(
        "the newest token is looked for in the row that the request has now",
        "found here: rows move between two steps",
        ASYNC_RUNNER,
        "AsyncGPUModelRunner._prepare_input_ids",
        "rows = self.input_batch.prev_rows[req_indices[unknown]]",
        "rows = req_indices[unknown]",
        ASYNC_SPEC,
    ),
    Mutant(
        "penalties overlook the token that is still under way",
        "found here: the host does not have it yet",
        ASYNC_RUNNER,
        "AsyncGPUModelRunner._add_output_tokens",
        "newest.masked_fill(known, -1)",
        "newest.fill_(-1)",
        ASYNC_SPEC,
    ),
    Mutant(
        "an aborted request's last token is given to the next of its name",
        "found here",
        ASYNC_RUNNER,
        "AsyncGPUModelRunner.fill_in_token",
        "if row is not None and self.requests.get(request.req_id) is request:",
        "if row is not None:",
        f"{ASYNC}::test_an_aborted_request_leaves_nothing_behind",
    ),
    # ---- CUDA graphs ----
    Mutant(
        "after a failed step graphs read the block table of before",
        "found here: a reset made the rows anew, graphs keep addresses",
        RUNNER,
        "GPUModelRunner.reset",
        "self._make_input_batch(block_table)",
        "self._make_input_batch()",
        RESET_SPEC,
    ),
]
