//! Sequences that get shorter, or go on with tokens of the engine's.

use crate::{Manager, Sequence, Tokens, TruncateError};

impl Manager {
    /// Cuts a sequence to its first `tokens` tokens, and returns where its KV ends. Results of steps that were
    /// staged before are stale.
    ///
    /// The KV ends at the cut, or where it ended before; with groups that do not keep all of it, further ahead:
    /// where every group can go on, at token 0 if nowhere else. The tokens from there on are to be computed again.
    ///
    /// Blocks behind the cut are released. A cut inside a block that others hold, or that has a name,
    /// leaves that as it is: the block is copied before the sequence writes to it.
    ///
    /// # Errors
    /// [`TruncateError`]; the sequence is as it was.
    pub fn truncate(&mut self, sequence: &mut Sequence, tokens: u64) -> Result<u64, TruncateError> {
        self.look_at_running(sequence)?;
        let known = sequence.known.tokens();
        if tokens > known {
            return Err(TruncateError::Beyond { tokens, known });
        }
        sequence.known.truncate(&self.namer, tokens);
        Ok(self.cut(sequence, tokens))
    }

    /// Adds tokens that did not come out of a step: the next turn of a conversation. The next steps
    /// compute them as they compute a prompt. What stands behind placeholder ids among them, such as a picture, is said with
    /// them, by [`Tokens::With`].
    ///
    /// # Errors
    /// [`TruncateError`]; the sequence is as it was.
    pub fn extend<'a>(
        &mut self,
        sequence: &mut Sequence,
        tokens: impl Into<Tokens<'a>>,
    ) -> Result<(), TruncateError> {
        self.look_at_running(sequence)?;
        if sequence.ends.is_open() {
            return Err(TruncateError::Later);
        }
        let tokens = tokens.into();
        sequence.known.check(&self.namer, &tokens)?;
        sequence.known.add(&self.namer, tokens);
        Ok(())
    }
}
