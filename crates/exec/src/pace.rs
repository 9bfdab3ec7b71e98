//! A pace for blocks: each takes at least as long as it is told, by sleeping.
//!
//! Ranks that sleep do not compete for cores. So a pipeline of four stages, with the costs of another machine, can be run in real
//! time on a small one: real programs, real exchanges, and a timeline in which idle time means waiting for other stages.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use polyreme_graph::{Block, Body};

use crate::engine::Engine;

/// Says how long a block takes.
type OfBlock = dyn Fn(&Body, &Block) -> Duration + Send + Sync;

/// How long a block of a body takes at least.
#[derive(Clone)]
pub struct BlockPace(Arc<OfBlock>);

impl BlockPace {
    /// The pace that a function says.
    pub fn new(of: impl Fn(&Body, &Block) -> Duration + Send + Sync + 'static) -> BlockPace {
        BlockPace(Arc::new(of))
    }

    pub(crate) fn of(&self, body: &Body, block: &Block) -> Duration {
        (self.0)(body, block)
    }
}

impl Engine {
    /// Lets blocks take at least as long as `pace` says, from now on; `None` for as fast as they are. A timeline has a span for
    /// each.
    pub fn set_pace(&mut self, pace: Option<BlockPace>) {
        self.pace = pace;
    }
}

impl fmt::Debug for BlockPace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockPace")
    }
}
