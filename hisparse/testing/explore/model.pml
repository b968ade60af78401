/* The guards: what decides which trigger of which table is applied, and when. */

#define WORD(mask, k)     (((mask) >> (k)) & 1)
#define OVER(r, k)        (WORD(done[k], r) || WORD(said_c[r] | said_f[r], k))
#define SAYS(r, k)        (!WORD(lost, r) && kind[k] && told[k] && !OVER(r, k))
#define IS_READ(k)        (kind[k] == RESTORE || !holds[k])
#define QUEUED(k)         ((enq[k] | done[k]) == RANKS)
#define DURABLE(p)        (page[p] == HostPage_COMPLETED || page[p] == HostPage_PUBLISHED)
#define FINDABLE(k)       (pair[k] && page[pair[k]] == HostPage_PUBLISHED)
#define MAY_FAIL          (crashes + failures < FAULTS && failures < FAILURES)
#define MAY_CRASH         (crashes + failures < FAULTS && crashes < CRASHES)

/* Where the queues have a block or page, beside what its table says of it. */
#define LEASED 0
#define FREE_QUEUE 1
#define IDLE_QUEUE 2
#define QUEUE_OF_BLOCK(s) ((s) == BlockLease_FREE -> FREE_QUEUE : ((s) == BlockLease_CACHED -> IDLE_QUEUE : LEASED))

/* A request's place in the scheduler's lists, beside what its table says of it. */
#define WAITS 0
#define LIVES 1
#define DRAINS 2
#define IS_GONE 3

hidden byte i, j, k, m, p, s, stretch, first, best, best_size;
hidden byte news, was_read, touched, ready, in_flight, read_over, last;
hidden byte what, who, ending, how_ended, keep;

/* -- moves: a table, or nothing ------------------------------------------------------------- */

inline move_request(i_, how) {
  q[i_] = Request_next(q[i_], how); assert(q[i_] != ILLEGAL || !IllegalTransition)
}
inline move_hot(i_, how) {
  hot[i_] = HotRegion_next(hot[i_], how); assert(hot[i_] != ILLEGAL || !IllegalTransition)
}
inline move_block(k_, how) {
  block[k_] = BlockLease_next(block[k_], how); assert(block[k_] != ILLEGAL || !IllegalTransition)
}
inline move_page(p_, how) {
  page[p_] = HostPage_next(page[p_], how); assert(page[p_] != ILLEGAL || !IllegalTransition)
}
inline move_copy(k_, how) {
  copy[k_] = Transfer_next(copy[k_], how); assert(copy[k_] != ILLEGAL || !IllegalTransition)
}

/* -- leases that end ------------------------------------------------------------------------ */

inline give_back_block(k_, how, queue) {
  assert(!(kind[k_] && holds[k_] && (kind[k_] == RESTORE || !QUEUED(k_))) || !spill_before_free);
  held[k_] = 0;
  move_block(k_, how);
  block_in[k_] = queue;
  if :: queue == FREE_QUEUE -> pair[k_] = 0 :: else fi
}
inline free_page(p_) {
  page_in[p_] = FREE_QUEUE; whole[p_] = 0;
  for (m : 0 .. PLACES - 1) { if :: pair[m] == p_ -> pair[m] = 0 :: else fi }
}
inline give_back_page(k_, how) {
  p = host[k_]; host[k_] = 0;
  assert((!kind[k_] && refs[p] == 1) || !host_reuse_after_readers);
  assert(how != HostPage_reclaimed || !whole[p] || !host_reuse_after_readers);
  refs[p]--;
  move_page(p, how);
  free_page(p)
}
/* Best fit for one page: the lowest of the smallest run of free ones. */
inline take_page(i_) {
  best = 0; best_size = 255; stretch = 0;
  for (j : 1 .. PAGES) {
    if :: page[j] == HostPage_FREE -> if :: stretch == 0 -> first = j :: else fi; stretch++ :: else fi;
    if
    :: stretch && (j == PAGES || page[j + 1] != HostPage_FREE) ->
       if :: stretch < best_size -> best = first; best_size = stretch :: else fi; stretch = 0
    :: else
    fi
  }
  assert(best != 0 || !AssertionError);
  move_page(best, HostPage_reserved);
  page_in[best] = LEASED; refs[best] = 1;
  reserved[i_ * WIDTH + promised[i_]] = best; promised[i_]++
}

/* -- what a rank's words lead to ------------------------------------------------------------ */

inline settle(k_) {
  kind[k_] = 0; copy[k_] = 0; enq[k_] = 0; done[k_] = 0; holds[k_] = 0; told[k_] = 0
}
/* All ranks have answered, one of them by FAILED: what nothing could read is reserved anew. */
inline end_failed(k_) {
  if
  :: kind[k_] == RESTORE -> refs[host[k_]]--
  :: kind[k_] != RESTORE && holds[k_] -> move_block(k_, BlockLease_failed)
  :: else
  fi;
  was_read = IS_READ(k_);
  settle(k_);
  if
  :: !was_read ->
     give_back_page(k_, HostPage_reclaimed);
     if :: phase[owner[k_]] == LIVES -> take_page(owner[k_]) :: else fi
  :: else
  fi
}
/* `last`: this rank is the last that was waited for. Which trigger it is, the quorum decides. */
inline fail(r) {
  for (k : 0 .. PLACES - 1) {
    if
    :: kind[k] && WORD(said_f[r], k) && !WORD(done[k], r) &&
       ((done[k] | (1 << r)) == RANKS) == last ->
       news = copy[k] != Transfer_FAILING;
       done[k] = done[k] | (1 << r);
       if :: last -> move_copy(k, Transfer_failed) :: else -> move_copy(k, Transfer_failed_partial) fi;
       if :: news && kind[k] != RESTORE -> move_page(host[k], HostPage_failed) :: else fi;
       if
       :: last -> end_failed(k)
       :: !last && news && kind[k] != RESTORE && holds[k] -> move_block(k, BlockLease_failed_partial)
       :: else
       fi
    :: else
    fi
  }
}
inline enqueue(r) {
  for (k : 0 .. PLACES - 1) {
    if
    :: kind[k] && WORD(said_e[r] | said_c[r], k) && !WORD(enq[k], r) &&
       copy[k] != Transfer_FAILING && ((enq[k] | (1 << r)) == RANKS) == last ->
       enq[k] = enq[k] | (1 << r);
       if
       :: last -> move_copy(k, Transfer_enqueued_last)
       :: else -> move_copy(k, Transfer_enqueued_partial)
       fi;
       if
       :: last && kind[k] != RESTORE ->
          move_block(k, BlockLease_enqueued);
          move_page(host[k], HostPage_enqueued)
       :: else
       fi;
       if
       :: last && kind[k] == SPILL && phase[owner[k]] == LIVES && computed[k] ->
          give_back_block(k, BlockLease_spilled, FREE_QUEUE);
          holds[k] = 0;
          unsettled[owner[k]]++
       :: else
       fi
    :: else
    fi
  }
}
inline end_completed(k_) {
  if
  :: kind[k_] == RESTORE -> move_block(k_, BlockLease_restored); refs[host[k_]]--
  :: else ->
     move_page(host[k_], HostPage_completed);
     whole[host[k_]] = (done[k_] == RANKS);
     if :: holds[k_] -> move_block(k_, BlockLease_completed) :: else fi
  fi;
  if
  :: holds[k_] ->
     for (m : 0 .. PLACES - 1) { if :: pair[m] == host[k_] -> pair[m] = 0 :: else fi };
     pair[k_] = host[k_]
  :: else
  fi;
  was_read = IS_READ(k_);
  settle(k_);
  if :: was_read -> unsettled[owner[k_]]-- :: else fi;
  if
  :: was_read && unsettled[owner[k_]] == 0 -> confirmed[owner[k_]] = rows_computed[owner[k_]]
  :: else
  fi
}
inline complete(r) {
  touched = 0;
  for (k : 0 .. PLACES - 1) {
    if
    :: kind[k] && WORD(said_c[r], k) && !WORD(done[k], r) &&
       ((done[k] | (1 << r)) == RANKS) == last ->
       done[k] = done[k] | (1 << r);
       if
       :: last -> move_copy(k, Transfer_completed_last); touched = touched | (1 << owner[k])
       :: else -> move_copy(k, Transfer_completed_partial)
       fi;
       if
       :: last && copy[k] == Transfer_FAILED -> end_failed(k)
       :: last && copy[k] != Transfer_FAILED -> end_completed(k)
       :: else
       fi
    :: else
    fi
  };
  for (i : 0 .. REQUESTS - 1) { if :: WORD(touched, i) -> publish(i) :: else fi }
}
/* The gap-free prefix of durable, confirmed pages; a page whose content is findable is passed over. */
inline publish(i_) {
  do
  :: published[i_] < WIDTH && published[i_] < confirmed[i_] / PAGE_ROWS ->
     s = place_at[i_ * WIDTH + published[i_]];
     if
     :: s == NONE -> break
     :: s != NONE && (content[s] == NONE || page[host[s]] != HostPage_COMPLETED) -> break
     :: else
     fi;
     if
     :: !found[content[s]] ->
        assert(whole[host[s]] || !complete_before_publish);
        move_page(host[s], HostPage_published);
        found[content[s]] = 1
     :: else
     fi;
     published[i_]++
  :: else -> break
  od
}

/* -- ends ------------------------------------------------------------------------------------ */

inline end_request(i_) {
  move_request(i_, how_ended);
  move_request(i_, Request_drained);
  phase[i_] = DRAINS;
  if
  :: admitted[i_] ->
     for (k : 0 .. PLACES - 1) {
       if
       :: keep && owner[k] == i_ && sealed[k] && held[k] && block[k] == BlockLease_DIRTY -> pin(k, i_)
       :: else
       fi
     };
     for (j : 1 .. WIDTH) {
       if
       :: j <= promised[i_] ->
          p = reserved[i_ * WIDTH + j - 1]; reserved[i_ * WIDTH + j - 1] = 0;
          refs[p]--;
          move_page(p, HostPage_abandoned);
          free_page(p)
       :: else
       fi
     };
     promised[i_] = 0;
     if :: hot[i_] == HotRegion_LEASED -> move_hot(i_, HotRegion_released) :: else fi
  :: else
  fi
}
/* What is sealed and nowhere else is written back; no rank is told of it any more. */
inline pin(k_, i_) {
  assert(promised[i_] > 0 || !AssertionError);
  p = reserved[i_ * WIDTH];
  for (j : 1 .. WIDTH - 1) { reserved[i_ * WIDTH + j - 1] = reserved[i_ * WIDTH + j] };
  reserved[i_ * WIDTH + WIDTH - 1] = 0; promised[i_]--;
  host[k_] = p; kind[k_] = WRITE_BACK; holds[k_] = 1;
  move_block(k_, BlockLease_pinned);
  move_page(p, HostPage_pinned)
}
inline drain(i_) {
  in_flight = 0;
  for (k : 0 .. PLACES - 1) {
    if
    :: owner[k] == i_ && held[k] && !(kind[k] && holds[k]) ->
       if
       :: block[k] == BlockLease_RESERVED -> give_back_block(k, BlockLease_abandoned, FREE_QUEUE)
       :: block[k] == BlockLease_DIRTY -> give_back_block(k, BlockLease_retired, FREE_QUEUE)
       :: block[k] == BlockLease_CLEAN && FINDABLE(k) -> give_back_block(k, BlockLease_cached, IDLE_QUEUE)
       :: block[k] == BlockLease_CLEAN && !FINDABLE(k) -> give_back_block(k, BlockLease_dropped, FREE_QUEUE)
       :: else
       fi
    :: else
    fi;
    if :: owner[k] == i_ && kind[k] -> in_flight++ :: else fi
  };
  read_over = 1;
  for (m : 0 .. N_RANKS - 1) { if :: retired[m] < last_step[i_] -> read_over = 0 :: else fi };
  if :: (!in_flight && read_over) || !admitted[i_] -> forget(i_) :: else fi
}
inline forget(i_) {
  for (k : 0 .. PLACES - 1) {
    if
    :: owner[k] == i_ && host[k] && page[host[k]] == HostPage_FAILED -> give_back_page(k, HostPage_reclaimed)
    :: owner[k] == i_ && host[k] && page[host[k]] == HostPage_COMPLETED -> give_back_page(k, HostPage_released)
    :: owner[k] == i_ && host[k] && page[host[k]] == HostPage_PUBLISHED ->
       p = host[k]; host[k] = 0; refs[p]--;
       if :: refs[p] == 0 -> page_in[p] = IDLE_QUEUE :: else fi
    :: else
    fi;
    assert(owner[k] != i_ || (!host[k] && !held[k]) || !AssertionError)
  };
  move_request(i_, Request_forgotten);
  phase[i_] = IS_GONE;
  hot[i_] = 0; published[i_] = 0; confirmed[i_] = 0; unsettled[i_] = 0
}

/* -- invariants of a state ------------------------------------------------------------------- */

inline check() {
  for (k : 0 .. PLACES - 1) {
    s = block[k];
    assert((s != BlockLease_FREE || !held[k]) || !conservation);
    assert(block_in[k] == QUEUE_OF_BLOCK(s) || !conservation);
    assert(s == BlockLease_QUARANTINED || held[k] == (QUEUE_OF_BLOCK(s) == LEASED) || !conservation);
    p = host[k];
    assert(phase[owner[k]] != LIVES || !computed[k] ||
           (held[k] && s >= BlockLease_DIRTY && s <= BlockLease_CLEAN) ||
           (held[k] && s == BlockLease_RESERVED && DURABLE(p) && kind[k] == RESTORE) ||
           (!held[k] && p && (DURABLE(p) || page[p] == HostPage_ENQUEUED) &&
               hot[owner[k]] == HotRegion_LEASED) ||
           !always_readable)
  };
  for (j : 1 .. PAGES) {
    s = (page[j] == HostPage_FREE -> FREE_QUEUE : ((page[j] == HostPage_PUBLISHED && !refs[j]) -> IDLE_QUEUE : LEASED));
    assert(page_in[j] == s || !conservation);
    assert(page[j] == HostPage_QUARANTINED || (refs[j] > 0) == (s == LEASED) || !conservation)
  };
  i = 0; j = 0; k = 0; m = 0; s = 0; p = 0
}

/* -- inputs, one indivisible step each -------------------------------------------------------- */

/* The step after the last retired: no copy is under way that it waits for. */
inline see_ready(r) {
  ready = 1;
  for (k : 0 .. PLACES - 1) {
    if
    :: kind[k] && told[k] && waited[k] && waited[k] <= retired[r] + said_r[r] + 1 && !OVER(r, k) -> ready = 0
    :: else
    fi
  }
}
inline hear(r) {
  for (last : 0 .. 1) { fail(r) };
  for (last : 0 .. 1) { enqueue(r) };
  for (last : 0 .. 1) { complete(r) };
  said_e[r] = 0; said_c[r] = 0; said_f[r] = 0; said_r[r] = 0
}
inline lose(r) {
  lost = lost | (1 << r); crashes++;
  retired[r] = STEP;
  said_e[r] = 0; said_c[r] = 0; said_r[r] = 0;
  said_f[r] = 255  /* what it had not acknowledged has failed on it */
}

#define SAY 0  /* is all in the choice */
#define RETIRE 1
#define ACKNOWLEDGE 2
#define LOSE 3
#define FINISH 4
#define ABORT 5
#define PREEMPT 6

/* `what` was chosen, of rank or request `who`. */
inline perform() {
  ending = 0; keep = (what != ABORT && what != LOSE);
  if
  :: what == FINISH -> how_ended = Request_finished; ending = 1 << who
  :: what == ABORT -> how_ended = Request_aborted; ending = 1 << who
  :: what == PREEMPT -> how_ended = Request_preempted; ending = 1 << who
  :: what == LOSE ->
     lose(who);
     how_ended = Request_preempted;
     for (i : 0 .. REQUESTS - 1) { if :: LIVE(q[i]) -> ending = ending | (1 << i) :: else fi }
  :: what == ACKNOWLEDGE -> retired[who] = retired[who] + said_r[who]
  :: what == RETIRE -> see_ready(who); said_r[who] = said_r[who] + ready
  :: else
  fi;
  for (i : 0 .. REQUESTS - 1) { if :: WORD(ending, i) -> end_request(i) :: else fi };
  if :: what == ACKNOWLEDGE || what == LOSE -> hear(who); ending = 255 :: else fi;
  for (i : 0 .. REQUESTS - 1) {
    if :: WORD(ending, i) && phase[i] == DRAINS -> drain(i) :: else fi
  };
  check()
}
