//! Another manager beside, whose handles are none of the first one's.

use super::engine::Engine;
use super::run::blocks_of;
use crate::prelude::*;

/// What another manager has given out.
#[derive(Debug)]
pub struct Foreign {
    manager: Manager,
    sequence: Option<Sequence>,
    tenant: TenantId,
}

impl Foreign {
    /// With two tenants, as many as the first manager may have, and as many groups as it has or more.
    pub fn new(like: &ManagerOptions) -> Self {
        let pool = PoolConfig { secondary_blocks: 8, ..PoolConfig::primary_only(64) };
        let mut options = ManagerOptions::of(like.groups.clone());
        options.groups.iter_mut().for_each(|group| group.pool = pool.clone());
        let mut manager = Manager::new(options).unwrap();
        manager.add_tenant().unwrap();
        let tenant = manager.add_tenant().unwrap();
        let mut request = [Request::new(vec![1, 2, 3])];
        let answer = manager.ask_all(&mut request, u64::MAX).pop();
        let Some(Answer::Admitted(sequence)) = answer else { panic!("{answer:?}") };
        Self { manager, sequence: Some(sequence), tenant }
    }

    fn open_step(&mut self) -> OpenStep {
        self.manager.begin_step().unwrap()
    }
}

impl Engine {
    /// A call with what another manager has given out changes nothing.
    pub fn confuse(&mut self) {
        let before = self.runs.first().map(|run| run.view(&self.manager));
        let Some(mut sequence) = self.foreign.sequence.take() else { return };
        let foreign = SequenceError::Foreign;
        let view =
            |of: &Sequence| (blocks_of(of), of.known(), of.resolved(), of.upper(), of.next());
        let own = view(&sequence);
        let manager = &mut self.manager;
        match self.random.below(12) {
            0 => assert_eq!(
                manager.commit(&mut sequence, 1, &[1]),
                Err(CommitError::Sequence(foreign))
            ),
            1 => assert_eq!(
                manager.reserve(&mut sequence, 1).unwrap_err(),
                ReserveError::Sequence(foreign)
            ),
            2 => assert_eq!(
                manager.reserve_draft(&mut sequence, 1).unwrap_err(),
                ReserveError::Sequence(foreign)
            ),
            3 => {
                assert_eq!(manager.extend(&mut sequence, &[1]), Err(ChangeError::Sequence(foreign)))
            }
            4 => {
                assert_eq!(manager.truncate(&mut sequence, 1), Err(ChangeError::Sequence(foreign)))
            }
            5 => {
                assert_eq!(manager.fork(&mut sequence).unwrap_err(), ChangeError::Sequence(foreign))
            }
            6 => assert_eq!(
                manager.suspend(&mut sequence).unwrap_err(),
                SuspendError::Sequence(foreign)
            ),
            7 => assert_eq!(
                manager.resume(&mut sequence).unwrap_err(),
                SuspendError::Sequence(foreign)
            ),
            8 => match manager.commit_draft(&mut sequence, 1, 1).unwrap_err() {
                DraftError::Sequence(error) => assert_eq!(error, foreign),
                error => assert_eq!(error, DraftError::NoDraftModel),
            },
            9 => {
                manager.retain(&sequence, Priority::MIN);
                assert_eq!(manager.block_ids(GroupId(0), &sequence), []);
            }
            10 => self.confuse_steps(&mut sequence),
            _ => {
                let refused = manager.export(sequence).unwrap_err();
                assert_eq!(refused.reason, ChangeError::Sequence(foreign));
                sequence = refused.sequence;
            }
        }
        assert_eq!(view(&sequence), own);
        self.foreign.sequence = Some(sequence);
        self.confuse_tenants();
        assert_eq!(self.runs.first().map(|run| run.view(&self.manager)), before);
        self.saw("a call with another manager's");
    }

    /// Steps of another manager, and its sequences in a step of one's own.
    fn confuse_steps(&mut self, sequence: &mut Sequence) {
        let step = self.foreign.open_step();
        let number = step.number();
        let refused = self.manager.stage(&step, &mut []).unwrap_err();
        assert_eq!(refused, StageError::NotOpen { step: number });
        let refused = self.manager.finish_step(step);
        assert!(matches!(refused, Err(StepError::Foreign { .. })), "{refused:?}");
        if let Some(own) = self.open.as_ref().filter(|open| self.manager.is_unstaged(open)) {
            let refused = self.manager.stage(own, &mut [sequence]).unwrap_err();
            let source = SequenceError::Foreign;
            assert_eq!(refused, StageError::Sequence { index: 0, reason: source });
        }
    }

    /// A tenant of another manager has no bounds here, and nobody asks for it.
    fn confuse_tenants(&mut self) {
        let tenant = self.foreign.tenant;
        let expected = TenantError::Foreign { tenant };
        for group in 0..=self.size.further.len() as u16 {
            let set =
                self.manager.set_quota(GroupId(group), tenant, Tier::Primary, TenantQuota::NONE);
            assert_eq!(set, Err(BudgetError::Tenant(expected.clone())));
        }
        let mut request = Request::new(vec![1]);
        request.tenant = tenant;
        let answer = self.manager.ask_all(&mut [request], u64::MAX).pop();
        let Some(Answer::Refused(refused)) = answer else { panic!("{answer:?}") };
        assert_eq!(refused, AdmitError::Tenant(expected));
    }
}
