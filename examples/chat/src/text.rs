//! Text and token ids: a model's tokenizer, and how a conversation is written for it.

use anyhow::{Context as _, anyhow};
use candle_core::quantized::gguf_file::Content;
use tokenizers::Tokenizer;

use crate::model::number;

/// Who says something.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// What the model is told about its task.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// How a conversation is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Template {
    /// `<|im_start|>user\n…<|im_end|>\n`
    ChatMl,
    /// `<|start_header_id|>user<|end_header_id|>\n\n…<|eot_id|>`
    Llama3,
    /// `user: …\n`, for a model that was not trained to converse.
    Lines,
}

/// The tokenizer of a model.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    template: Template,
    begin: Vec<u32>,
    ends: Vec<u32>,
}

impl Text {
    /// The tokenizer of a file, with the marks of conversations that its vocabulary has.
    pub(crate) fn new(tokenizer: Tokenizer, content: &Content) -> Self {
        let has = |token: &str| tokenizer.token_to_id(token).is_some();
        let template = match (has("<|im_start|>"), has("<|start_header_id|>")) {
            (true, _) => Template::ChatMl,
            (_, true) => Template::Llama3,
            _ => Template::Lines,
        };
        let named = |key: &str| number(content, key).ok();
        let end = named("tokenizer.ggml.eos_token_id");
        let marks = ["<|im_end|>", "<|eot_id|>", "<|endoftext|>"];
        let ends = marks.iter().filter_map(|mark| tokenizer.token_to_id(mark)).chain(end).collect();
        let begin = named("tokenizer.ggml.bos_token_id").filter(|_| template == Template::Llama3);
        Self { template, begin: begin.into_iter().collect(), ends, tokenizer }
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn ids(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let encoded = self.tokenizer.encode_fast(text, false);
        let encoded =
            encoded.map_err(|error| anyhow!("{error}")).context("cannot read the text")?;
        Ok(encoded.get_ids().to_vec())
    }

    /// The ids of a conversation, up to where the model goes on.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn conversation(&self, messages: &[(Role, String)]) -> anyhow::Result<Vec<u32>> {
        let mut ids = self.begin.clone();
        for (role, message) in messages {
            ids.extend(self.ids(&self.message(*role, message))?);
        }
        let open = match self.template {
            Template::ChatMl => "<|im_start|>assistant\n",
            Template::Llama3 => "<|start_header_id|>assistant<|end_header_id|>\n\n",
            Template::Lines => "assistant:",
        };
        ids.extend(self.ids(open)?);
        Ok(ids)
    }

    fn message(&self, role: Role, message: &str) -> String {
        let role = role.name();
        match self.template {
            Template::ChatMl => format!("<|im_start|>{role}\n{message}<|im_end|>\n"),
            Template::Llama3 => {
                format!("<|start_header_id|>{role}<|end_header_id|>\n\n{message}<|eot_id|>")
            }
            Template::Lines => format!("{role}: {message}\n"),
        }
    }

    /// The ids that end an answer.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The text of ids, without marks.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn of(&self, ids: &[u32]) -> anyhow::Result<String> {
        self.tokenizer.decode(ids, true).map_err(|error| anyhow!("{error}"))
    }

    /// A token as the vocabulary has it, with its id.
    #[must_use]
    pub fn token(&self, id: u32) -> String {
        format!("{:?} ({id})", self.tokenizer.id_to_token(id).unwrap_or_default())
    }
}

/// The text of an answer as its ids arrive. Characters of several ids come whole.
#[derive(Debug, Default)]
pub struct Streamed {
    ids: Vec<u32>,
    shown: usize,
}

impl Streamed {
    /// What further ids add.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn push(&mut self, text: &Text, ids: &[u32]) -> anyhow::Result<String> {
        self.ids.extend_from_slice(ids);
        let all = text.of(&self.ids)?;
        if all.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let new = all.get(self.shown..).unwrap_or_default().to_owned();
        self.shown = all.len();
        Ok(new)
    }
}
